/* Layout of the structures of NVIDIA's video decoder that are used here, as its interface fixes it, and what the parser
 * exchanges with Python. */
#include <stdint.h>
#include <stdlib.h>

enum { H264 = 4, HEVC = 8, VP9 = 10, AV1 = 11, NUM_CODECS = 12 };
enum { CHROMA_420 = 1 };
enum { NV12 = 0, P016 = 1 };
enum { END_OF_STREAM = 1, TIMESTAMP = 2, NOTIFY_END = 16 };
enum { UNKNOWN = 999 };

struct caps {
    int codec, chroma;
    unsigned bit_depth_minus8, reserved[3];
    unsigned char is_supported, num_engines;
    unsigned short output_formats;
    unsigned max_width, max_height, max_macroblocks;
    unsigned short min_width, min_height;
    unsigned char has_histogram, counter_depth;
    unsigned short max_bins;
    unsigned reserved_too[10];
};

struct video_format {
    int codec;
    struct {
        unsigned numerator, denominator;
    } frame_rate;
    unsigned char progressive, luma_depth_minus8, chroma_depth_minus8, num_surfaces;
    unsigned coded_width, coded_height;
    struct {
        int left, top, right, bottom;
    } display;
    int chroma;
    unsigned bitrate;
    struct {
        int x, y;
    } aspect;
    struct {
        unsigned char kind_and_range, primaries, transfer, matrix;
    } signal;
    unsigned header_bytes;
};

struct packet {
    unsigned long flags, num_bytes;
    const unsigned char *bytes;
    long long timestamp;
};

struct display {
    int index, progressive, top_field_first, repeat_first_field;
    long long timestamp;
};

struct picture_params {
    int width_in_macroblocks, height_in_macroblocks, index, is_field, is_bottom, is_second;
    unsigned num_bytes;
    const unsigned char *bytes;
    unsigned num_slices;
    const unsigned *slices;
    int is_reference, is_intra;
    unsigned reserved[30];
    unsigned of_codec[1024];
};

struct parser_params {
    int codec;
    unsigned max_surfaces, clock_rate, error_threshold, max_delay, flags, reserved[4];
    void *user;
    int (*on_sequence)(void *, struct video_format *);
    int (*on_decode)(void *, struct picture_params *);
    int (*on_display)(void *, struct display *);
    void *on_operating_point, *on_messages, *reserved_too[5], *header;
};

struct decoder_params {
    unsigned long width, height, num_surfaces;
    int codec, chroma;
    unsigned long flags, bit_depth_minus8, intra_only, max_width, max_height, reserved;
    struct {
        short left, top, right, bottom;
    } display;
    int output_format, deinterlacing;
    unsigned long target_width, target_height, num_outputs;
    void *lock;
    struct {
        short left, top, right, bottom;
    } target;
    unsigned long histogram, reserved_too[4];
};

struct mapping {
    int progressive, is_second, top_field_first, is_unpaired;
    unsigned reserved_flags, reserved_zero;
    unsigned long long raw_input;
    unsigned raw_input_pitch, raw_input_format;
    unsigned long long raw_output;
    unsigned raw_output_pitch, reserved;
    void *stream;
};

/* ---- what the parser exchanges with Python ---- */

enum { FEED = 0, FLUSH = 1, FORGET = 2 };
enum { MAX_PICTURES = 64 };

struct picture {
    long long pts;
    const unsigned char *nv12; /* rows of luma, then of chroma; valid until the parser is called again */
    unsigned num_bytes;
};

struct parsed {
    int width, height; /* 0: unknown yet */
    int bit_depth, matrix, num_pictures;
    struct picture pictures[MAX_PICTURES];
};

/* Parse one packet; return 0, or an error. */
typedef int (*parse_t)(long parser, int codec, const void *bytes, unsigned long num_bytes, long long pts, int verb,
                       struct parsed *parsed);

struct limits {
    int supported, engines, min_width, min_height, max_width, max_height, macroblocks;
};

struct video_counts {
    long packets, fails_at, created, open, mapped;
};

static inline long setting_of_engines(void)
{
    const char *value = getenv("CUDA_DOUBLE_NVDEC_ENGINES");
    return value && *value ? atol(value) : 2;
}
