/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA driver, a CUPTI and a CUDA runtime without a device, for tests of the helper: what they have
 * of each other. They obey the published ABI as far as gpu/nvidia/helper/cupti.h declares it, which
 * abi_check.c compares with NVIDIA's headers.
 *
 * A kernel "runs" as long as its grid has blocks, BLOCK_NS each, one after the other in a stream, and
 * takes nothing of the processor. For each block it is sampled SAMPLES_OF_BLOCK times, at the default
 * period, at three instructions; more often by the block's warps, if it has several.
 *
 * In kernel-serialized mode a launch waits for its kernel, which begins when no other runs. What it was
 * sampled is then in the buffer that sampling was configured with, with the launch's number, and
 * GetData has it kernel by kernel. What finds no room in there has the number of one launch for all. The
 * mode is that of the session: it is set once. A launch in that mode, and the end of sampling,
 * synchronise: that ends all captures.
 *
 * STANDIN in the environment has words that make something go wrong, NAME or NAME=NUMBER:
 *
 *   driver=N cupti=N   versions; 12090 and 28 if not said
 *   no-rights          PC sampling is forbidden: 35
 *   taken              somebody holds the one subscription of V1; V2 says that it is "nsys"
 *   taken=N            the same for the first N that ask
 *   v2                 somebody has subscribed by V2, and lets others in
 *   full=N             the device's buffer is full in the first N sessions, which stay as they are
 *   mute=N             there are no samples in the first N sessions
 *   mute-period        there are none with a period that was set
 *   drop=N foreign=N   so many samples are dropped, are in other code, with each read-out
 *   few                one instruction a read-out
 *   copies             each sample has a new copy of its function's name
 *   reloads            all functions' names are at one place, and all kernels' at another, one after
 *                      the other
 *   lost=N             after N read-outs the context is lost
 *   fatal=N            CUPTI ends itself, after N launches
 *   two-ids            driver and runtime number the same call differently
 *   first=N            the number of the first call
 *   slow=N             a read-out takes N ms
 *   no-serialized      there is no such mode
 *   old-graphs         kernels of graphs have the number of the first session's last launch of one, in
 *                      all sessions but the first, as CUPTI of 13.1
 *   other-graphs       ... the number of the launch of a graph before theirs
 *   reversed           of the buffers of a flush, the first one lent has the last kernels
 *   held=N             a flush gives buffers of N kernels, only those of which all have ended, as
 *                      cupti_activity.h has it; a forced one all, in which a kernel that runs is a
 *                      record that is refused
 *   holds              it always has a buffer, which a forced flush gives to whoever registered last
 *   mig                devices are instances of others
 *   interrupted=N      the first N readings of CUPTI's clock take 5 ms
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "../../gpu/nvidia/helper/cupti.h"

#define EXPORTED __attribute__((visibility("default")))

#define BLOCK_NS 1000ull
#define SAMPLES_OF_BLOCK 8
#define DEFAULT_EXPONENT 20
#define STREAM_CAPTURE_INVALIDATED 901

struct function {
	const char *name;
	struct module *module;
	uint32_t index;
};

struct module {
	uint32_t id;
	const void *cubin;
	size_t size;
	uint64_t crc;
	struct function functions[16];
	uint32_t function_count;
	struct module *next; /* of its context */
	bool is_unloaded;
};

struct node {
	uint64_t id;
	struct function *function;
	uint32_t blocks, warps;
};

struct graph {
	uint32_t id;
	struct node *nodes[64];
	uint32_t count;
};

struct stream {
	uint32_t id;
	uint64_t busy_until_ns;
	struct graph *capture;
	bool is_invalid; /* its capture */
};

/* How a kernel ran. */
struct run {
	struct context_of_driver *context;
	struct function *function;
	uint64_t begin_ns, end_ns; /* monotonic */
	uint64_t node;
	uint32_t stream, correlation, graph, blocks, warps;
};

struct sampler {
	bool is_on, is_wedged, has_mode, is_serialised, overflows;
	uint32_t sessions, exponent, reads;
	bool is_period_set;
	struct cupti_pc_data *buffer;
	struct count {
		struct function *function;
		uint64_t offset;
		uint32_t reason, count, correlation;
	} counts[4096];
	uint32_t count;
};

struct context_of_driver {
	uint32_t id, device;
	bool is_gone;
	struct module *modules;
	struct sampler sampler;
};

/* What CUPTI has the driver call. */
struct hooks {
	void (*api)(uint32_t domain, uint32_t id, uint32_t site, const char *name,
		    const void *params, void *result, struct context_of_driver *context,
		    uint32_t correlation);
	void (*resource)(uint32_t id, struct context_of_driver *context, void *descriptor);
	void (*ran)(const struct run *run);
	/* With standin_lock: whether the kernels of a context run one after the other. */
	bool (*serialises)(struct context_of_driver *context);
	void (*ended)(const struct run *run);
};

/* Of the driver, for the other two. */
extern const struct hooks *_Atomic standin_hooks;
extern pthread_mutex_t standin_lock;
/* Whether cuInit was called. */
extern _Atomic bool standin_is_used;
/* The number of the runtime's call that this thread is in. */
extern _Thread_local uint32_t standin_correlation;

uint64_t standin_now_ns(void);
/* By how much CLOCK_REALTIME was set. */
extern _Atomic int64_t standin_step_ns;
uint32_t standin_next_correlation(void);
/* The number after a word of STANDIN; `otherwise` where it is not there, 1 where it has none. */
uint64_t standin_word(const char *name, uint64_t otherwise);
/* A call that a capture does not bear: it ends all that are open. */
void standin_unsafe_call(void);
/* One that synchronises, which none bears in any mode. */
void standin_synchronise(void);
struct context_of_driver *standin_context(void);

#endif
