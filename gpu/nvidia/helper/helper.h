/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The helper for NVIDIA (gpu/PROTOCOL.md), and what its parts are to each other.
 *
 * One thread of its own does what takes time: it calls CUPTI, and writes. CUPTI's callbacks come in
 * the target's threads, where a launch waits for them: they take no lock, and leave what they have
 * to events.h. The one lock is held by who calls CUPTI and writes: the helper's thread, and for a
 * moment who begins (InitializeInjection), who destroys a context, and who begins a capture in a
 * serialised window.
 */
#ifndef AIFLAME_HELPER_H
#define AIFLAME_HELPER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cupti.h"
#include "protocol.h"

/* Of CUPTI; V2 lets others subscribe as well, and may not be mixed with V1 in a process. */
struct subscription {
	cupti_subscriber handle;
	bool is_v2;
};

/* helper.c */

/* Tells an error; `what` failed. Who calls has the lock. */
void tell_error(enum error error, cupti_result code, const char *what);
/* By what CUPTI returns. */
enum error error_of(cupti_result code);
/* A context of the driver: told where it is new, or its period is. Who calls has the lock. */
void tell_context(uint32_t context, uint32_t device, uint64_t period_cycles);
/* Its reasons: told where they are others than before. Who calls has the lock. */
void tell_reasons(uint32_t context, const struct reason *reasons, uint32_t count);
/* Stalls are sampled now (""), or in no context any more: why. Who calls has the lock. */
void stalls_reached(const char *why);
/* They will be, when no stream is captured. Who calls has the lock. */
void stalls_wait(void);
/* Takes what callbacks have left. Who calls has the lock. */
void take_events(void);
/* Whether the lock was had within two seconds: for who must not wait for ever. */
bool lock_for_a_while(void);
void unlock(void);

/* launches.c: callbacks of launches, contexts, modules and graphs. */

/* Returns what CUPTI says; *what is which call. */
cupti_result launches_subscribe(struct subscription *subscription, char *rival, const char **what);
cupti_result launches_begin(const struct subscription *subscription, bool with_code,
			    const char **what);
void launches_end(const struct subscription *subscription);
/* CUPTI has ended by itself: it is not called any more. */
void launches_drop(void);
/* CUPTI's number, which has 32 bits, as one that comes once only; 0 stays 0. */
uint64_t launch_of(uint32_t correlation);
/* The highest so far. */
uint64_t launches_newest(void);
/* Whether some launch of a graph was not told, or may have run nothing, since callbacks are on. */
bool launches_lost_graphs(void);
/* A copy of a module, from an event. */
void launches_free(void *bytes, size_t size);
/* Whether some stream is being captured, as far as was seen, and for no longer than a capture takes. */
bool launches_capture(void);
/* Whether CUPTI has said that it has ended by itself: for good. */
bool launches_were_ended(void);

/* kernels.c: kernel times. */

cupti_result kernels_begin(const struct subscription *subscription, const char **what);
enum flush {
	FLUSH_NOTHING, /* only what CUPTI gives by itself */
	FLUSH_ENDED,
	FLUSH_ALL, /* and then no more */
};

/* Gets and tells what has ended. */
void kernels_read(const struct subscription *subscription, enum flush flush);
void kernels_end(const struct subscription *subscription);
/* How many were told in all. */
uint64_t kernels_told(void);

/* stalls.c: PC sampling. */

/* From any thread: a context that is there. */
void stalls_see(cu_context context);
/* From its thread, before it is gone. */
void stalls_forget(cu_context context);
void stalls_begin(uint32_t period_exponent);
/* Begins in new contexts, reads the others out where it is time. */
void stalls_turn(bool is_time);
/* A kernel ran in a context, from a time on, so long. */
void stalls_ran(uint32_t context, uint64_t begin_ns, uint64_t ns);
/* A serialised window, where there is one context, and no capture. */
void stalls_open_window(void);
/* Ends it, or one that is due only if there are other contexts by now, unless there is a capture. */
void stalls_close_window(bool is_due);
bool stalls_have_window(void);
/* From the thread that is about to begin a capture. */
void stalls_before_capture(void);
void stalls_pause(void);
void stalls_resume(void);
void stalls_end(void);
void stalls_drop(void);
/* The calling thread may call CUPTI while others capture a stream. */
void stalls_relax_captures(void);

#endif
