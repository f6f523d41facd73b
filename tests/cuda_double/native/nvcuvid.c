/* libnvcuvid.so.1: NVIDIA's video parser and decoder, of which the pictures are made by FFmpeg.
 *
 * The parser gives packets to a function of Python (`tests/cuda_double/video.py`), which decodes them by PyAV, and
 * reports the pictures in display order, as the driver does. What the parser hands to the decoder as the bitstream of a
 * picture is the picture itself, in NV12. The decoder keeps it in a surface of its own; mapping it copies it into an
 * output surface in device memory, on the stream that the program names.
 */
#include "double.h"

#include <string.h>

#include "cuvid.h"
#include "runtime.h"

enum { MAX_OUTPUTS = 64, PITCH = 512 };

static parse_t parse;
static struct video_counts video_counts;
static pthread_mutex_t videos = PTHREAD_MUTEX_INITIALIZER; /* guards the counts and the limits */

struct parser {
    struct parser_params params;
    bool announced;
    struct parsed last; /* the format that was announced */
    int next, surfaces;
};

struct surface {
    char *content;
    size_t size;
};

struct output {
    void *address;
    bool mapped;
};

struct decoder {
    struct decoder_params params;
    int device;
    size_t pitch, bytes;
    struct surface *surfaces;
    struct output outputs[MAX_OUTPUTS];
};

/* ---- limits ---- */

static struct limits known[NUM_CODECS] = {
    [H264] = {1, 0, 48, 16, 4096, 4096, 65536},
    [HEVC] = {1, 0, 144, 144, 8192, 8192, 262144},
    [VP9] = {1, 0, 128, 128, 8192, 8192, 262144},
    [AV1] = {1, 0, 128, 128, 8192, 8192, 262144},
};

API int cuvidGetDecoderCaps(struct caps *caps)
{
    static const struct limits none;
    pthread_mutex_lock(&videos);
    struct limits found = caps->codec >= 0 && caps->codec < NUM_CODECS ? known[caps->codec] : none;
    pthread_mutex_unlock(&videos);
    bool supported = found.supported && caps->chroma == CHROMA_420 && caps->bit_depth_minus8 <= 2;
    caps->is_supported = supported;
    caps->num_engines = supported ? (unsigned char)(found.engines ? found.engines : setting_of_engines()) : 0;
    caps->output_formats = supported ? 1 << NV12 | 1 << P016 : 0;
    caps->max_width = (unsigned)found.max_width;
    caps->max_height = (unsigned)found.max_height;
    caps->max_macroblocks = (unsigned)found.macroblocks;
    caps->min_width = (unsigned short)found.min_width;
    caps->min_height = (unsigned short)found.min_height;
    return SUCCESS;
}

/* ---- parser ---- */

API int cuvidCreateVideoParser(struct parser **made, struct parser_params *params)
{
    struct parser *parser = calloc(1, sizeof *parser);
    parser->params = *params;
    parser->surfaces = 1;
    *made = parser;
    return SUCCESS;
}

API int cuvidDestroyVideoParser(struct parser *parser)
{
    if (parse)
        parse((long)parser, parser->params.codec, NULL, 0, 0, FORGET, NULL);
    free(parser);
    return SUCCESS;
}

static bool is_announced(const struct parser *parser, const struct parsed *now)
{
    return parser->announced && parser->last.width == now->width && parser->last.height == now->height &&
           parser->last.bit_depth == now->bit_depth;
}

static unsigned coded(int pixels) { return (unsigned)(pixels + 15) / 16 * 16; }

static bool announce(struct parser *parser, const struct parsed *now)
{
    struct video_format format = {
        .codec = parser->params.codec,
        .frame_rate = {30, 1},
        .progressive = 1,
        .luma_depth_minus8 = (unsigned char)(now->bit_depth - 8),
        .chroma_depth_minus8 = (unsigned char)(now->bit_depth - 8),
        .num_surfaces = 8,
        .coded_width = coded(now->width),
        .coded_height = coded(now->height),
        .display = {0, 0, now->width, now->height},
        .chroma = CHROMA_420,
        .aspect = {now->width, now->height},
        .signal = {5, 2, 2, (unsigned char)now->matrix},
    };
    int surfaces = parser->params.on_sequence(parser->params.user, &format);
    if (surfaces <= 0)
        return false;
    parser->surfaces = surfaces == 1 ? (int)parser->params.max_surfaces : surfaces;
    if (parser->surfaces < 1)
        parser->surfaces = 1;
    parser->announced = true;
    parser->last = *now;
    parser->next = 0;
    return true;
}

static bool show(struct parser *parser, const struct parsed *now, const struct picture *picture)
{
    struct picture_params decode = {0};
    decode.width_in_macroblocks = (int)coded(now->width) / 16;
    decode.height_in_macroblocks = (int)coded(now->height) / 16;
    decode.index = parser->next++ % parser->surfaces;
    decode.num_bytes = picture->num_bytes;
    decode.bytes = picture->nv12;
    decode.num_slices = 1;
    if (parser->params.on_decode(parser->params.user, &decode) <= 0)
        return false;
    struct display display = {.index = decode.index, .progressive = 1, .timestamp = picture->pts};
    return parser->params.on_display(parser->params.user, &display) > 0;
}

API int cuvidParseVideoData(struct parser *parser, struct packet *packet)
{
    struct parsed now = {0};
    bool ends = packet->flags & END_OF_STREAM;
    if (!parse)
        return NOT_SUPPORTED;
    if (packet->num_bytes) {
        pthread_mutex_lock(&videos);
        long number = ++video_counts.packets, fails_at = video_counts.fails_at;
        pthread_mutex_unlock(&videos);
        if (number == fails_at)
            return ILLEGAL_ADDRESS;
    }
    if (parse((long)parser, parser->params.codec, packet->bytes, packet->num_bytes,
              packet->flags & TIMESTAMP ? packet->timestamp : 0, ends ? FLUSH : FEED, &now))
        return UNKNOWN;
    if (now.width && !is_announced(parser, &now) && !announce(parser, &now))
        return UNKNOWN;
    for (int i = 0; i < now.num_pictures; i++)
        if (!show(parser, &now, &now.pictures[i]))
            return UNKNOWN;
    if (ends && packet->flags & NOTIFY_END)
        parser->params.on_display(parser->params.user, NULL);
    return SUCCESS;
}

/* ---- decoder ---- */

API int cuvidDestroyDecoder(struct decoder *decoder)
{
    for (int i = 0; i < MAX_OUTPUTS; i++)
        if (decoder->outputs[i].address)
            RUNTIME(cudaFree, (void *), decoder->outputs[i].address);
    for (unsigned long i = 0; i < decoder->params.num_surfaces; i++)
        free(decoder->surfaces[i].content);
    free(decoder->surfaces);
    free(decoder);
    pthread_mutex_lock(&videos);
    video_counts.open--;
    pthread_mutex_unlock(&videos);
    return SUCCESS;
}

API int cuvidCreateDecoder(struct decoder **made, struct decoder_params *params)
{
    struct decoder *decoder = calloc(1, sizeof *decoder);
    decoder->params = *params;
    RUNTIME(cudaGetDevice, (int *), &decoder->device);
    unsigned sample = params->output_format == P016 ? 2 : 1;
    decoder->pitch = (params->target_width * sample + PITCH - 1) / PITCH * PITCH;
    decoder->bytes = decoder->pitch * ((params->target_height + 1) / 2 * 2) * 3 / 2;
    decoder->surfaces = calloc(params->num_surfaces ? params->num_surfaces : 1, sizeof *decoder->surfaces);
    pthread_mutex_lock(&videos);
    video_counts.created++;
    video_counts.open++;
    pthread_mutex_unlock(&videos);
    unsigned long outputs = params->num_outputs < MAX_OUTPUTS ? params->num_outputs : MAX_OUTPUTS;
    for (unsigned long i = 0; i < (outputs ? outputs : 1); i++) {
        int error = RUNTIME(cudaMalloc, (void **, size_t), &decoder->outputs[i].address, decoder->bytes);
        if (error) {
            decoder->outputs[i].address = NULL;
            cuvidDestroyDecoder(decoder);
            return error;
        }
    }
    *made = decoder;
    return SUCCESS;
}

API int cuvidReconfigureDecoder(struct decoder *decoder, void *params)
{
    (void)decoder, (void)params;
    return NOT_SUPPORTED;
}

/* Lay the rows of a picture out as an output surface has them. */
API int cuvidDecodePicture(struct decoder *decoder, struct picture_params *picture)
{
    unsigned long width = decoder->params.target_width, height = decoder->params.target_height;
    unsigned long sample = decoder->params.output_format == P016 ? 2 : 1, row = width * sample;
    if (picture->index < 0 || (unsigned long)picture->index >= decoder->params.num_surfaces ||
        picture->num_bytes != row * height * 3 / 2)
        return INVALID_VALUE;
    struct surface *surface = &decoder->surfaces[picture->index];
    if (!surface->content)
        surface->content = malloc(decoder->bytes);
    memset(surface->content, 0xCB, decoder->bytes);
    unsigned long chroma_at = (height + 1) / 2 * 2;
    for (unsigned long y = 0; y < height * 3 / 2; y++)
        memcpy(surface->content + (y < height ? y : y - height + chroma_at) * decoder->pitch, picture->bytes + y * row,
               row);
    return SUCCESS;
}

API int cuvidMapVideoFrame64(struct decoder *decoder, int index, unsigned long long *address, unsigned *pitch,
                             struct mapping *mapping)
{
    if (index < 0 || (unsigned long)index >= decoder->params.num_surfaces || !decoder->surfaces[index].content)
        return INVALID_VALUE;
    for (int i = 0; i < MAX_OUTPUTS; i++) {
        struct output *output = &decoder->outputs[i];
        if (!output->address || output->mapped)
            continue;
        int error = RUNTIME(cudaMemcpyAsync, (void *, const void *, size_t, int, struct stream *), output->address,
                            decoder->surfaces[index].content, decoder->bytes, 1, mapping->stream);
        if (error)
            return error;
        output->mapped = true;
        *address = (unsigned long long)output->address;
        *pitch = (unsigned)decoder->pitch;
        pthread_mutex_lock(&videos);
        video_counts.mapped++;
        pthread_mutex_unlock(&videos);
        return SUCCESS;
    }
    return INVALID_HANDLE; /* all output surfaces are mapped */
}

API int cuvidUnmapVideoFrame64(struct decoder *decoder, unsigned long long address)
{
    for (int i = 0; i < MAX_OUTPUTS; i++)
        if (decoder->outputs[i].mapped && (unsigned long long)decoder->outputs[i].address == address) {
            decoder->outputs[i].mapped = false;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

API int cuvidGetDecodeStatus(struct decoder *decoder, int index, int *status)
{
    (void)decoder, (void)index;
    *status = 2; /* without errors: the driver hides many, and so does the double */
    return SUCCESS;
}

API int cuvidCtxLockCreate(void **lock, void *context)
{
    *lock = context;
    return SUCCESS;
}

API int cuvidCtxLockDestroy(void *lock) { return (void)lock, SUCCESS; }
API int cuvidCtxLock(void *lock, unsigned flags) { return (void)lock, (void)flags, SUCCESS; }
API int cuvidCtxUnlock(void *lock, unsigned flags) { return (void)lock, (void)flags, SUCCESS; }

/* Files are read by FFmpeg, never by the driver. */
API int cuvidCreateVideoSource(void) { return NOT_SUPPORTED; }
API int cuvidCreateVideoSourceW(void) { return NOT_SUPPORTED; }
API int cuvidDestroyVideoSource(void) { return NOT_SUPPORTED; }
API int cuvidSetVideoSourceState(void) { return NOT_SUPPORTED; }
API int cuvidGetVideoSourceState(void) { return NOT_SUPPORTED; }
API int cuvidGetSourceVideoFormat(void) { return NOT_SUPPORTED; }
API int cuvidGetSourceAudioFormat(void) { return NOT_SUPPORTED; }

/* ---- what tests set and read, by tests/cuda_double/video.py ---- */

API void cuda_double_set_parser(parse_t function) { parse = function; }

API void cuda_double_set_limits(int codec, const struct limits *limits)
{
    pthread_mutex_lock(&videos);
    known[codec] = *limits;
    pthread_mutex_unlock(&videos);
}

API void cuda_double_get_limits(int codec, struct limits *limits)
{
    pthread_mutex_lock(&videos);
    *limits = known[codec];
    pthread_mutex_unlock(&videos);
}

/* Let the n-th packet from here on fail; 0: none. */
API void cuda_double_fail_at(long packet)
{
    pthread_mutex_lock(&videos);
    video_counts.fails_at = packet ? video_counts.packets + packet : 0;
    pthread_mutex_unlock(&videos);
}

API void cuda_double_video_counts(struct video_counts *found)
{
    pthread_mutex_lock(&videos);
    *found = video_counts;
    pthread_mutex_unlock(&videos);
}
