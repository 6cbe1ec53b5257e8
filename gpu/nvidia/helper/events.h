/* SPDX-License-Identifier: Apache-2.0 */
/* What callbacks leave for the helper's own thread: a bounded queue without locks. */
#ifndef AIFLAME_EVENTS_H
#define AIFLAME_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cupti.h"

enum event_kind {
	EVENT_MODULE_LOADED,
	EVENT_MODULE_UNLOADED,
	EVENT_NODE,
	EVENT_GRAPH_LAUNCH,
};

struct event {
	enum event_kind kind;
	uint32_t module, context; /* CUPTI's numbers; no context: 0 */
	uint64_t at_ns;
	void *bytes; /* of a module: a copy, to be freed; NULL: not kept */
	size_t size;
	uint64_t node, original, launch;
	/* Of the launch of a graph: its handle, and its id, 0 where that is not known. */
	uint64_t executable;
	uint32_t graph;
};

/* From any thread. Returns false where it is full, which is counted. */
bool event_push(const struct event *event);

/* For one thread. Returns false where it is empty. */
bool event_take(struct event *event);

#endif
