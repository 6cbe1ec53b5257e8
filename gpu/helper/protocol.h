/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a helper in a target and the recorder tell each other; gpu/PROTOCOL.md explains it. Vendor
 * neutral. All numbers are little-endian, all times CLOCK_MONOTONIC nanoseconds, all strings UTF-8
 * with a zero at the end, one after the other at the end of a record.
 */
#ifndef AIFLAME_PROTOCOL_H
#define AIFLAME_PROTOCOL_H

#include <stdint.h>

/* Tests build older ones. */
#ifndef PROTOCOL_VERSION
#define PROTOCOL_VERSION 3
#endif
#define MEMORY_HEADER_BYTES 4096
#define MEMORY_VERSION 1

/* The first bytes of the memory; gpu/ring.py has the first five. */
struct memory_header {
	char magic[8]; /* "aiflame" */
	uint32_t version, unused;
	uint64_t ring_bytes; /* the ring follows the header */
	_Atomic uint64_t ring_head;
	uint64_t facts_bytes; /* the facts follow the ring */
	_Atomic uint64_t facts_head;
	int32_t control_fd; /* read end of the control pipe in this process; -1: there is none */
	int32_t pid; /* as the process itself sees it */
};

/* Before each record, in the ring and among the facts. */
struct record_header {
	uint32_t size; /* with this, a multiple of 8 */
	uint32_t kind;
	uint64_t number; /* they count from 0, ring and facts each for themselves */
};

enum fact {
	FACT_HELLO = 1,
	FACT_DEVICE = 2,
	FACT_CONTEXT = 3,
	FACT_REASONS = 4,
	FACT_NAME = 5,
	FACT_CODE = 6,
	FACT_NODE = 7,
};

enum tier {
	TIER_LAUNCHES = 0,
	TIER_TIMES = 1,
	TIER_STALLS = 2,
};

/* The last one holds. Then: vendor, helper's version, library's version, driver's version, why the
 * tier is not higher ("" where it is the highest, or the one that was asked for). */
struct fact_hello {
	uint32_t protocol;
	int32_t pid;
	uint32_t tier;
	uint32_t unused;
};

/* Then: its name. */
struct fact_device {
	uint32_t device; /* as the driver counts them in this process */
	uint32_t multiprocessors;
	uint32_t clock_khz; /* the highest */
	uint16_t major, minor; /* of the architecture: compute capability */
	uint8_t uuid[16];
};

/* The last one of a context holds. */
struct fact_context {
	uint32_t context;
	uint32_t device;
	uint64_t period_cycles; /* of stall sampling, as the device says; 0: none */
};

/* Then `count` of struct reason. */
struct fact_reasons {
	uint32_t context;
	uint32_t count;
};

struct reason {
	uint32_t reason;
	uint32_t name;
};

/* Then the text: a kernel's linkage name, a function's, a reason's. */
struct fact_name {
	uint32_t name;
	uint32_t unused;
};

/* Then its bytes, `code_bytes` of them, or nothing where they were not kept. */
struct fact_code {
	uint64_t code; /* what samples call it: NVIDIA's CRC */
	uint64_t loaded_ns; /* when it was seen */
	uint64_t code_bytes;
	uint32_t context;
	uint32_t module;
};

/* A node of a graph. */
struct fact_node {
	uint64_t node;
	uint64_t original; /* the node that it was copied from; 0: it is none */
	uint64_t launch; /* the launch that built it, by capture; 0: unknown */
};

enum passing {
	PASSING_TIMES = 16,
	PASSING_STALLS = 17,
	PASSING_CODE_UNLOADED = 18,
	PASSING_LOSSES = 19,
	PASSING_ERROR = 20,
	PASSING_STATE = 21,
	PASSING_SERIALISED = 22,
};

/* PASSING_TIMES: as many as the record has room for. */
struct kernel_time {
	uint64_t launch; /* as the probe tells it; 0: none */
	uint64_t begin_ns, end_ns;
	uint64_t queue; /* the vendor's number of the stream, no handle */
	uint64_t node; /* of a graph; 0: none */
	uint32_t name;
	uint32_t device;
	uint32_t context;
	uint32_t graph; /* 0: none */
};

/* Then stalls, as many as the record has room for, taken between the two times. */
struct passing_stalls {
	uint64_t begin_ns, end_ns;
	uint32_t context;
	uint32_t device;
	uint64_t period_cycles; /* as read back in their session; 0: they have none */
};

struct stall {
	uint64_t code;
	uint64_t offset; /* in the function, in bytes */
	uint64_t launch; /* 0: the device did not say */
	uint32_t name; /* the function's */
	uint32_t function; /* its index in the code object */
	uint32_t reason;
	uint32_t count;
};

/* A window in which the kernels of a context ran one after the other; after its samples. */
struct passing_serialised {
	uint64_t begin_ns, end_ns;
	uint32_t context;
	uint32_t device;
};

struct passing_code_unloaded {
	uint64_t code;
	uint64_t unloaded_ns;
	uint32_t context;
	uint32_t module;
};

enum loss {
	LOSS_SAMPLES_DROPPED = 1, /* by the device */
	LOSS_BUFFER_FULL =
		2, /* times that the device's buffer was full: nothing is known of them */
	LOSS_SAMPLES_FOREIGN = 3, /* in code that the vendor does not tell about */
	LOSS_TIMES_DROPPED = 4, /* kernel times that the vendor dropped, for want of buffers */
	LOSS_NAMES = 5, /* no room for more; their name is 0 */
	LOSS_CODE_BYTES = 6, /* code objects whose bytes were not kept */
	LOSS_CONTEXTS = 7, /* more than there is room for: not sampled */
	LOSS_EVENTS = 8, /* modules and graph nodes that came faster than they were taken */
	LOSS_LAUNCH_IDS = 9, /* launches whose runtime and driver calls had two numbers */
	LOSS_FACTS = 10, /* other facts for which there was no room */
	LOSS_TIMES_REFUSED = 11, /* kernel times that make no sense */
	LOSS_UNNUMBERED = 12, /* samples of serialised windows that are told without their launch */
	LOSS_GRAPH_IDS = 13, /* kernels of graphs whose launch was told wrongly, and is not known */
};

/* PASSING_LOSSES: as many as the record has room for; what came since the last such record. */
struct loss_count {
	uint32_t loss;
	uint32_t unused;
	uint64_t count;
};

enum error {
	ERROR_NO_LIBRARY = 1, /* the vendor's profiling library is not there */
	ERROR_SYMBOL = 2, /* it lacks a function; text: which */
	ERROR_TOO_OLD = 3,
	ERROR_TAKEN = 4, /* another profiler has it; text: which */
	ERROR_RIGHTS = 5, /* the process may not sample */
	ERROR_UNSUPPORTED = 6, /* this device, or this kind of virtual device, does not */
	ERROR_MEMORY = 7, /* the device's memory, or the host's */
	ERROR_CONTROL = 8, /* a message that is none */
	ERROR_NAMES = 9, /* names are copied each time: sampling ended, before memory did */
	ERROR_DRIVER = 10, /* the driver has ended profiling by itself */
	ERROR_CALL = 11, /* any other call that failed; text: which */
	ERROR_NO_SAMPLES = 12, /* kernels ran, and no sample came, also after another try */
	ERROR_SERIALISED = 13, /* a serialised window did not begin, or went on into a capture */
	ERROR_GRAPH_IDS = 14, /* numbers of launches of graphs are wrong; text: how that is known */
	ERROR_QUIET = 15, /* no kernel time came for long, though kernels were launched */
};

/* Then: what failed, and what the vendor says. */
struct passing_error {
	uint64_t at_ns;
	uint32_t error;
	int32_t code; /* the vendor's; 0: none */
};

enum why {
	WHY_ASKED = 0,
	WHY_RECORDER_GONE = 1,
	WHY_ERROR = 2,
	WHY_DUTY = 3, /* it is paused, or goes on: see struct control */
};

struct passing_state {
	uint64_t at_ns;
	uint32_t tier; /* what goes on from here: TIER_LAUNCHES is off */
	uint32_t why;
	uint32_t
		duty_permille; /* of the time, in which stalls are sampled from here on; 0: not told */
	uint32_t unused;
};

#define CONTROL_MAGIC 0x63666961 /* "aifc" */

enum verb {
	VERB_START = 1,
	VERB_STOP = 2,
};

/* What the recorder writes into the pipe, at once. */
struct control {
	uint32_t magic;
	uint32_t version; /* PROTOCOL_VERSION */
	uint32_t verb;
	uint32_t tier; /* the highest that is wanted */
	uint32_t
		duty_permille; /* of the time, in which stalls are sampled; 1000: always, 0: never */
	uint32_t
		period_exponent; /* 2 to the power of it is the period in cycles; 0: the vendor's */
	uint32_t read_out_ms; /* how often samples are read out */
	uint32_t serialised_permille; /* of the time, in windows that name launches; 0: never */
};

#endif
