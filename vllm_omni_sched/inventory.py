"""List every vLLM name that this package overrides, wraps or rebinds, and the condition for its removal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """Describes an override of a vLLM name. ``guard``: when the change is active. ``test``: the file that covers it."""

    symbol: str
    delta: str
    guard: str
    test: str
    remove_when: str


_S = "Scheduler"
_OURS = "our scheduler is named"

INVENTORY: tuple[Override, ...] = (
    Override(
        "EngineArgs.create_engine_config",
        "checks our options and attaches our metrics after vLLM made its config; puts our video loader and the model's "
        "own sampling rule into its media_io_kwargs",
        f"wrapped by register(); acts when {_OURS}, or the video loader omni_flashcodec is",
        "tests/engine/test_bad_input.py",
        "vLLM offers plugins a hook to validate additional_config",
    ),
    Override(
        "InputProcessor.__init__, InputProcessor.process_inputs, AsyncLLM.generate, "
        "OpenAIServingResponses.create_responses",
        "before super(): a request with invalid omni_ keys, or with a class or target that clients may not ask for, is "
        "refused with HTTP 400",
        f"wrapped by the check of options; acts when {_OURS}",
        "tests/engine/test_serving.py",
        "vLLM lets a plugin validate extra_args in the front end",
    ),
    Override(
        "EngineCore.collective_rpc, EngineCore.preprocess_add_request",
        "around super(): no lane computes while a call of a client may change weights, and what was encoded before is "
        "given up; after super(): the items of a request are hashed, on the thread that receives it",
        "encode_ahead, or encoder_share_bytes",
        "tests/engine/test_changed_weights.py",
        "vLLM tells connectors that weights change, and says which hashes it has made itself",
    ),
    Override(
        "GPUModelRunner.reset_encoder_cache (V1, V2)",
        "after super(): the encodings of the lane and of host memory are dropped, and the lane has ended its work",
        "encode_ahead",
        "tests/engine/test_changed_weights.py",
        "connectors are told of a reset",
    ),
    Override(
        "WorkerWrapperBase.init_device",
        "mixes our runner mixin into the class of the worker's model runner",
        f"wrapped by register(); acts when {_OURS}",
        "tests/engine/test_off_means_absent.py",
        "model runners of all platforms come from a factory that can be named",
    ),
    Override(
        "parallel_state._TP",
        "in the encoder process of a rank, never in a worker: a group that reaches the encoder processes of the others",
        "encode_ahead with tensor parallelism, on CPUs",
        "tests/engine/test_tensor_parallel.py",
        "never: vLLM's own groups do not work after a fork",
    ),
    Override(
        "AsyncOmniEngine._initialize_stages",
        "before super(): stages get the devices of the best plan, and are asked to report bytes, cache hits and device "
        "memory",
        "wrapped where vLLM-Omni is loaded; acts when there are options of the stage scheduler",
        "tests/omni/unit/test_initial_placement.py",
        "a plugin may choose the devices of stages, and their own statistics have bytes, cache hits and device memory",
    ),
    Override(
        "OmniConnectorFactory.create_connector",
        "the class of the connector is replaced by one that counts messages and bytes around super()",
        "in the processes of stages that are to report",
        "tests/omni/unit/test_stage_reporter.py",
        "connectors count bytes themselves",
    ),
    Override(
        "OmniTransferAdapterBase.recv_loop",
        "before super(): the queue of waiting requests and the condition become ours, so that the loop polls only "
        "requests whose message may be there, and sleeps until one is shown",
        "wrapped where vLLM-Omni's adapter is loaded; acts when its connector is one of ours over one arena",
        "tests/omni/unit/test_receiving.py",
        "vLLM-Omni lets a connector wait for several messages at once",
    ),
    Override(
        "KVCacheManager.get_computed_blocks, EncoderCacheManager.check_and_update_cache",
        "after them: counts hits; nothing is changed",
        "in the processes of stages that are to report",
        "tests/omni/unit/test_stage_reporter.py",
        "vLLM counts prefix hits without log_stats, and hits of the encoder cache",
    ),
    Override(
        "BaseRenderer.__init__",
        "after it: forks the preprocessing pool; on this renderer, _process_multimodal_async and the processor's "
        "_apply_hf_processor_main use it",
        f"wrapped by the check of options; acts when {_OURS}, with preprocess.processes above 0",
        "tests/engine/test_preprocess_pool.py",
        "vLLM has a pool of processes for its multimodal processors",
    ),
    Override(
        "MultiModalProcessorSenderCache.get_and_update_item (0.33: LruKeyReplicatedSenderCache), "
        "BaseRenderer._process_multimodal, add_request and add_request_async of vLLM's core clients",
        "around super(): an item that no request has taken to the engine core keeps its data, and counts as not cached "
        "once all requests with its data have ended",
        f"wrapped by the check of options; acts when {_OURS}",
        "tests/engine/test_leaving.py",
        "clients that leave no longer fail requests with the same items (vLLM's cache of items in the API process)",
    ),
    Override(
        "ImageMediaIO.load_bytes, multimodal.parse.normalize_image",
        "JPEG, PNG and WebP pictures are decoded by the preprocessing pool, and turned upright there",
        "wrapped with the first preprocessing pool of a process",
        "tests/engine/test_preprocess_pool.py",
        "vLLM has a pool of processes for its multimodal processors",
    ),
    Override(
        "multimodal.media.image.normalize_image, multimodal.parse.normalize_image (in processes of the pool)",
        "a picture that is upright is not copied",
        "wrapped with the first job of a process of the preprocessing pool",
        "tests/engine/test_preprocess_work.py",
        "vLLM does not copy pictures that are upright",
    ),
    Override(
        "init_entrypoints_middleware",
        "after it: adds a middleware, in which requests that arrive together begin one after the other",
        f"wrapped once imported; acts when {_OURS}, with preprocess.processes above 0",
        "tests/engine/test_preprocess_arrivals.py",
        "vLLM's server begins a bounded number of requests in a turn of its event loop",
    ),
    Override(
        "OpenAIServingChat.create_chat_completion, OpenAIServingCompletion.create_completion, "
        "OpenAIServingResponses.create_responses (for preprocessing)",
        "before them: remembers the extra arguments of the request, which name its class",
        f"wrapped once imported; acts when {_OURS}, with preprocess.processes above 0",
        "tests/engine/test_preprocess_pool.py",
        "vLLM passes extra_args to its renderer",
    ),
    Override(
        "VIDEO_LOADER_REGISTRY",
        "has our video loader under the name omni_flashcodec",
        "added by register(); used when it is chosen",
        "tests/engine/test_video_choice.py",
        "never: it is vLLM's own way",
    ),
    Override(
        "video_decoders.opencv.decode_opencv",
        "ours on a thread on which our video loader runs one of vLLM's; in 0.22 a subclass of the rule reads instead",
        "omni_flashcodec is chosen, from its first video on",
        "tests/engine/test_video_loader.py",
        "vLLM lets a plugin register a video decoder, not only a loader",
    ),
    Override(
        f"{_S}.schedule",
        "after super(): session entries become deltas, committed data is spilled; nothing is decided",
        "session_delta for the deltas",
        "tests/differential/test_same_decisions.py",
        "vLLM sends deltas of sessions itself (vllm#58324)",
    ),
    Override(
        "shm_broadcast.sched_yield",
        "rebound: readers of message queues sleep between looks: the engine core in long waits, workers beside encodes",
        "encode_ahead on CPUs, from the start of the scheduler or of the worker on",
        "tests/engine/test_ahead_polling.py",
        "the engine core and its workers wait for each other without polling",
    ),
    Override(
        f"{_S}._try_schedule_encoder_inputs",
        "super() on the items in the window, when vLLM is linear (0.22) or items are nested or unsorted",
        "windows",
        "tests/differential/test_same_decisions.py",
        "oldest supported vLLM is 0.23 and vLLM's window is right for nested items",
    ),
    Override(
        f"{_S}._try_schedule_encoder_inputs, scheduler_config.long_prefill_token_threshold (for items that wait)",
        "after super() has answered with no token for ever: the threshold is raised in the next step; up to 0.32, "
        "super() without the tokens that a drafter reads, and encodings of passed items are freed before it is past "
        "them",
        "disable_chunked_mm_input with long_prefill_token_threshold, or a drafter that reads ahead on 0.30 to 0.32",
        "tests/differential/test_stuck_requests.py",
        "vLLM lets an item pass a threshold below it, and the oldest supported vLLM is 0.33",
    ),
    Override(
        f"{_S}._make_cached_request_data",
        "adds the items that runner V1 must get back after a preemption; counts blocks sent",
        "session_delta, strip_frontier",
        "tests/engine/test_preemption.py",
        "vLLM gives stripped data back to runner V1 on preemption",
    ),
    Override(
        f"{_S}._get_encoder_input_updates",
        "the set of pending inputs becomes an index range; a step without pending inputs is not searched",
        "pending_range, vLLM 0.33+, model runner V2, items in order",
        "tests/differential/test_other_versions.py",
        "vLLM's own is not O(pending) per step",
    ),
    Override(
        f"{_S}.add_request",
        "items out of order are sorted; those of sessions, and nested ones, become a FeatureList; updates of ended "
        "sessions are refused",
        _OURS,
        "tests/engine/test_bad_input.py",
        "the other entries are gone",
    ),
    Override(
        f"{_S}.update_from_output",
        "after super(): one error output for each refused session update",
        _OURS,
        "tests/engine/test_bad_input.py",
        "vLLM refuses updates of ended sessions",
    ),
    Override(
        f"{_S}._handle_stopped_request",
        "before super(): on 0.30, tokens in flight of a turn that has ended are discarded; after super(): a session "
        "that stopped while it was preempted is queued at the end of the step",
        "vLLM up to 0.32",
        "tests/differential/test_turn_ends.py",
        "oldest supported vLLM is 0.33, which does not lose such sessions",
    ),
    Override(
        f"{_S}._update_request_as_session",
        "super() gets no tokens of an update that leaves no room below max_model_len, and the session ends with an "
        "error; up to 0.32, it is told of a session preempted at the end of its turn that all its tokens but the last "
        "are computed",
        _OURS,
        "tests/differential/test_turn_ends.py",
        "vLLM refuses such updates, and the oldest supported vLLM is 0.33",
    ),
    Override(
        "DiffusionScheduler, DiffusionAsyncScheduler",
        "our scheduler is mixed into these instead of the ordinary ones",
        "vLLM 0.32+, diffusion_config is set",
        "tests/upstream/test_upstream.py",
        "vLLM has one scheduler for all models",
    ),
    Override(
        f"{_S}._preempt_request, _free_request, shutdown",
        "after super(): forget the session, close its spill file, count waiting requests, stop publishing",
        _OURS,
        "tests/differential/test_same_decisions.py",
        "the other entries are gone",
    ),
    Override(
        f"{_S}.reset_prefix_cache",
        "around super(): KV blocks that are lent to encodes are in the pool, which otherwise resets nothing",
        "kv_lending",
        "tests/engine/test_kv_lending.py",
        "vLLM resets the prefix cache while blocks are in use",
    ),
    Override(
        f"{_S}.reset_encoder_cache",
        "after super(): what is kept of encodings outside of vLLM's encoder cache is given up, too",
        "encode_ahead, or encoder_share_bytes",
        "tests/engine/test_changed_weights.py",
        "connectors are told of a reset",
    ),
    Override(
        f"{_S}.waiting, skipped_waiting, _select_waiting_queue_for_scheduling",
        "queues in our order; before 0.32, where skipped requests are apart, the better of both heads is next",
        "waiting_order sla",
        "tests/engine/test_who_runs.py",
        "vLLM lets a plugin name the class of its request queue",
    ),
    Override(
        f"{_S}.max_num_scheduled_tokens, max_num_active_reqs (0.32) or max_num_running_reqs",
        "lowered around super().schedule(), and set back; so is scheduler_config.long_prefill_token_threshold",
        "prefill_control, batch_control, pieces",
        "tests/engine/test_who_runs.py",
        "vLLM asks a policy for the limits of a step",
    ),
    Override(
        "EncoderCacheManager",
        "subclass: uses of repeated items are counted, all references of a request are freed in one pass",
        "encoder_cache, no manager of the operator's own",
        "tests/properties/test_encoder_cache.py",
        "oldest supported vLLM is 0.33",
    ),
    Override(
        "sched.output.strip_covered_mm_data",
        "rebound: a FeatureList moves its frontier, any other list goes to vLLM's function",
        "strip_frontier, vLLM 0.29+, from the first OmniScheduler of a process on",
        "tests/properties/test_feature_list.py",
        "vLLM strips incrementally (vllm#58324)",
    ),
    Override(
        "sched.scheduler.get_mm_features_in_window, kv_cache_utils.get_mm_features_in_window",
        "rebound: the window of a FeatureList is searched in its compact index",
        "windows, vLLM 0.23+, from the first OmniScheduler of a process on",
        "tests/differential/test_same_decisions.py",
        "vLLM keeps offsets and ends apart from the items",
    ),
    Override(
        "KVCacheManager.get_blocks",
        "of one scheduler's manager: the block ids of a tracked session are looked up when asked for",
        "session_delta, no KV connector",
        "tests/differential/test_same_decisions.py",
        "vLLM sends deltas of sessions itself",
    ),
    Override(
        "KVCacheManager.allocate_slots",
        "around super().schedule(): no room for waiting requests that would take what loans and running requests need",
        "kv_lending",
        "tests/engine/test_loan_admission.py",
        "vLLM asks a policy whom to admit",
    ),
    Override(
        "block_pool.generate_block_hash_extra_keys",
        "rebound: for a FeatureList the search starts at the block's first item",
        "kv_event_window, from the first OmniScheduler of a process on",
        "tests/differential/test_same_decisions.py",
        "vLLM starts KV events' extra keys at the window",
    ),
    Override(
        "GPUModelRunner._update_states (V1)",
        "before super(): session deltas become full entries, restored items are put back, and with "
        "encoder_cache_host_bytes encodings that it frees go to host memory",
        _OURS,
        "tests/engine/test_same_tokens.py",
        "vLLM sends deltas of sessions itself",
    ),
    Override(
        "GPUModelRunner._gather_mm_embeddings (V1)",
        "super() on the items in the window, when vLLM is linear (0.22) or items are nested or unsorted",
        "windows",
        "tests/engine/test_runner_v1.py",
        "oldest supported vLLM is 0.23 and vLLM's window is right for nested items",
    ),
    Override(
        "GPUModelRunner.sample_tokens (V1)",
        "around super(): the generators of requests whose prompt goes on are not in the batch",
        f"{_OURS}, on CPUs",
        "tests/engine/test_runner_v1.py",
        "vLLM can rewind generators of CPUs",
    ),
    Override(
        "GPUModelRunner.load_model, add_requests, finish_requests (V2)",
        "mixes into the encoder runner; before super(): session deltas become full entries",
        _OURS,
        "tests/engine/test_runner_v2.py",
        "vLLM sends deltas of sessions itself",
    ),
    Override(
        "EncoderRunner.gather_mm_embeddings (V2)",
        "super() on the items in the window, when vLLM is linear (0.22) or items are nested or unsorted",
        "windows",
        "tests/engine/test_runner_v2.py",
        "oldest supported vLLM is 0.24 and vLLM's window is right for nested items",
    ),
    Override(
        "GPUModelRunner.load_model, _init_mrope_positions (V1)",
        "super() on the tail of a resumed session's prompt; its positions are moved up and put behind the known ones",
        "mrope_append, session_delta, one of the models whose functions were read (by digest of their source)",
        "tests/engine/mrope/test_mrope_append.py",
        "vLLM computes positions of what is new in a session only",
    ),
    Override(
        "RopeState.init_prefill_positions (V2)",
        "super() on the tail of a resumed session's prompt; its writes go behind what the row holds",
        "as in V1, and the row still holds the session's positions",
        "tests/engine/mrope/test_mrope_append.py",
        "vLLM computes positions of what is new in a session only",
    ),
    Override(
        "prometheus_client.MultiProcessCollector.collect",
        "after super(): our families too (one API server: a collector in the global registry, no override)",
        f"several API servers (PROMETHEUS_MULTIPROC_DIR) and {_OURS}",
        "tests/unit/monitor/test_metrics_bridge.py",
        "vLLM lets a scheduler publish metrics",
    ),
    Override(
        "GPUModelRunner.load_model (V1)",
        "after super(): the lane of encode-ahead is built around the model's encoders",
        "encode_ahead, model runner V1",
        "tests/engine/test_same_tokens.py",
        "vLLM hands EC connectors the model (start_worker_services has no argument)",
    ),
    Override(
        "GPUModelRunner.execute_model (V1)",
        "after super(), in a step without tokens: the connector's life cycle, and a wait for an encode",
        "encode_ahead, model runner V1",
        "tests/engine/test_same_tokens.py",
        "runner V1 runs the connector of an ec_both instance in every step",
    ),
    Override(
        "GPUModelRunner.load_model, free_states, ActiveECConnector.maybe_get_output (V2)",
        "after super(): the lane is built as in V1; around super(), in a step without tokens: a wait for an encode",
        "encode_ahead, model runner V2",
        "tests/engine/test_ahead_runner_v2.py",
        "as in V1, and the engine core rests while only a connector can go on",
    ),
    Override(
        "AsyncOmniEngine._create_orchestrator",
        "makes our orchestrator, a subclass of vLLM-Omni's, which replaces each stage's pool by one of a subclass",
        "wrapped by register(); acts when the deploy YAML or the environment gives options of the stage scheduler",
        "tests/omni/unit/test_hooks.py",
        "vLLM-Omni lets the class of its orchestrator be named (patches/vllm-omni-0.30.0)",
    ),
    Override(
        "AsyncOmni.generate",
        "before super(): a request with invalid omni_ keys, or with a class that clients may not name, is refused with "
        "HTTP 400",
        "wrapped when an orchestrator of ours is made",
        "tests/omni/unit/test_front_end.py",
        "vLLM lets a plugin validate extra_args in the front end",
    ),
    Override(
        "OmniOpenAIServingChat.create_chat_completion",
        "before super(): keys of ours in vllm_xargs are checked, and reach the parameters of the first stage",
        "wrapped when an orchestrator of ours is made, once the server of vLLM-Omni is imported",
        "tests/omni/unit/test_front_end.py",
        "vLLM-Omni gives vllm_xargs of chat requests to the first stage",
    ),
    Override(
        "StageRuntime._build_logical_stage_init_plans",
        "before super(): stages that do not match the options are refused before any stage loads its model; the "
        "connectors of our options are put into the transfer config",
        "wrapped by register(); acts when the deploy YAML or the environment gives options of the stage scheduler",
        "tests/omni/unit/test_edges.py",
        "vLLM-Omni lets a plugin complete its deploy config",
    ),
    Override(
        "OmniCoordClientForStage._heartbeat_interval, MembershipController.WATCH_INTERVAL_S",
        "stages send a heartbeat, and the front end looks at the coordinator's list, as often as the variable says",
        "VLLM_OMNI_SCHED_HEARTBEAT_SECONDS is set",
        "tests/omni/unit/test_other_hosts.py",
        "vLLM-Omni has options for both",
    ),
    Override(
        "OmniCoordinator._handle_event",
        "after it, when no other event waits: replicas whose heartbeats are overdue are reported",
        "VLLM_OMNI_SCHED_HEARTBEAT_SECONDS is set",
        "tests/omni/unit/test_other_hosts.py",
        "the coordinator looks for silent replicas as often as its time-out needs it",
    ),
)
