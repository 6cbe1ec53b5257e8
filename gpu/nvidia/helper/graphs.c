/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUPTI of CUDA 13.1 gives kernels of graphs the numbers of other launches, in all sessions but the
 * first of a process (release notes of 13.1 Update 1). Such a number is refuted by what callbacks saw:
 * it is of no launch of a graph, of one of another graph, of one that came later than the kernel, or
 * of one that was over. Then no kernel's number is believed any more in that session.
 *
 * What is left is order. An executable graph runs once at a time, in the order of its launches, and
 * each of its nodes once in each (cuGraphLaunch, in cuda.h): the nth time that a node runs is of the
 * nth launch. Nodes in the body of a loop run more often: their order says nothing, and is taken for
 * one where numbers are refuted.
 *
 * The order is that in which kernels are read: kernels_read takes buffers by their time. Of a buffer
 * that comes after a newer one was read nobody knows how many turns it has before it is over: its
 * kernels are lost, and what was read too early has the launches before its own. What is read after
 * it has its turns again.
 */
#define _GNU_SOURCE
#include "graphs.h"

#include <string.h>

#include "helper.h"
#include "memory.h"

/* Launches that are known by number, and by turn: some seconds of the fastest replays. 2 MB each. */
#define MOST_LAUNCHES (1u << 16)
/* A server of a language model has some 70 graphs of a thousand nodes. */
#define MOST_GRAPHS (1u << 10)
#define MOST_NODES_THAT_RAN (1u << 17)
/* Slots that are looked at for one. */
#define MOST_STEPS 64
/* The two clocks differ by some microseconds. */
#define SLACK_NS 1000000ull
/* Launches of before the session may be behind by so much. Tests have less. */
#ifndef GRAPHS_BEHIND_NS
#define GRAPHS_BEHIND_NS 5000000000ull
#endif
/* Threads that were in a launch when callbacks were turned on. */
#define MOST_UNDER_WAY 64

/*
 * Versions that are known to. 13.1 Update 1 tells that it was mended, not since when it was so: for
 * others there is what refutes numbers.
 */
static const struct {
	uint32_t first, mended;
} wrong_versions[] = {
	{ 130100, 130101 },
};

struct graph {
	uint64_t key; /* CUPTI's id, else the handle; 0: the slot is free */
	uint64_t launches;
	uint64_t newest,
		newest_ns; /* launch that a kernel was told of, and when the first of it began */
};

struct launch {
	uint64_t launch, at_ns;
	struct graph *graph;
	uint64_t turn;
};

struct node {
	uint64_t node;
	uint64_t turns;
	uint64_t newest; /* when the last of them began, by CUPTI's clock */
};

static struct launch by_number[MOST_LAUNCHES], by_turn[MOST_LAUNCHES];
static struct graph graphs[MOST_GRAPHS];
static struct node nodes[MOST_NODES_THAT_RAN];
static uint32_t graph_count;
static uint64_t first_launch, begin_ns_of_session;
static bool misses_launches, misses_kernels, is_wrong;
/* Whether kernels have the ids of executable graphs, which is not published: in any session. */
static bool have_ids_fitted;

void graphs_begin(uint32_t version, uint64_t newest)
{
	static uint32_t sessions;

	memset(by_number, 0, sessions ? sizeof(by_number) : 0);
	memset(by_turn, 0, sessions ? sizeof(by_turn) : 0);
	memset(graphs, 0, sessions ? sizeof(graphs) : 0);
	memset(nodes, 0, sessions ? sizeof(nodes) : 0);
	graph_count = 0;
	first_launch = newest + MOST_UNDER_WAY;
	begin_ns_of_session = now_ns();
	misses_launches = misses_kernels = is_wrong = false;
	for (size_t at = 0; at < sizeof(wrong_versions) / sizeof(*wrong_versions); at++)
		is_wrong |= sessions && version >= wrong_versions[at].first &&
			    version < wrong_versions[at].mended;
	sessions++;
	if (is_wrong)
		tell_error(ERROR_GRAPH_IDS, 0, "by its version");
}

static uint64_t mixed(uint64_t key)
{
	key ^= key >> 33;
	key *= 0xff51afd7ed558ccdull; /* of MurmurHash3's finaliser */
	return key ^ key >> 33;
}

/* NULL: unknown, or there is no room to make it. */
static struct graph *find_graph(uint64_t key, bool is_new)
{
	for (uint64_t step = 0; step < MOST_STEPS; step++) {
		struct graph *graph = &graphs[(mixed(key) + step) % MOST_GRAPHS];

		if (graph->key == key)
			return graph;
		if (graph->key)
			continue;
		if (!is_new)
			return NULL;
		graph->key = key;
		graph_count++;
		return graph;
	}
	return NULL;
}

static struct launch *slot_of_turn(const struct graph *graph, uint64_t turn)
{
	return &by_turn[mixed(graph->key + turn * MOST_GRAPHS) % MOST_LAUNCHES];
}

void graphs_see(uint64_t launch, uint64_t executable, uint32_t id, uint64_t at_ns)
{
	uint64_t key = id ? id : executable;
	struct graph *graph = key ? find_graph(key, true) : NULL;
	struct launch made = { .launch = launch, .at_ns = at_ns, .graph = graph };

	if (graph)
		made.turn = graph->launches++;
	else
		misses_kernels = true; /* whose turn is it? */
	by_number[launch % MOST_LAUNCHES] = made;
	if (graph)
		*slot_of_turn(graph, made.turn) = made;
}

void graphs_miss_launches(void)
{
	misses_launches = true;
}

void graphs_miss_kernels(void)
{
	misses_kernels = true;
}

/* What runs from now on may seem older than what ran before. */
void graphs_clock_was_set(void)
{
	for (uint32_t at = 0; at < MOST_NODES_THAT_RAN; at++)
		nodes[at].newest = 0;
}

/* Of a number above 0; NULL: there is no room for it. */
static struct node *find_node(uint64_t number)
{
	for (uint64_t step = 0; step < MOST_STEPS; step++) {
		struct node *node = &nodes[(mixed(number) + step) % MOST_NODES_THAT_RAN];

		if (!node->node)
			node->node = number;
		if (node->node == number)
			return node;
	}
	return NULL;
}

/* Why a number is not that of the launch of a kernel, NULL: it may be. */
static const char *refute(uint64_t number, const struct cupti_kernel *kernel, uint64_t begin_ns)
{
	const struct launch *launch = &by_number[number % MOST_LAUNCHES];
	struct graph *graph = launch->graph;

	if (launch->launch != number) {
		/* It is forgotten, or nobody has seen all. */
		if (launch->launch > number || misses_launches)
			return NULL;
		if (number > first_launch || begin_ns > begin_ns_of_session + GRAPHS_BEHIND_NS)
			return "of no launch of a graph";
		return NULL;
	}
	if (begin_ns + SLACK_NS < launch->at_ns)
		return "of a later launch";
	if (!graph)
		return NULL;
	if (graph->key == kernel->graph)
		have_ids_fitted = true;
	else if (have_ids_fitted && find_graph(kernel->graph, false))
		return "of another graph's launch";
	if (number < graph->newest && begin_ns >= graph->newest_ns)
		return "of a launch that was over";
	/* Buffers may come out of order: what an older launch ran says nothing of the newest. */
	if (number > graph->newest || (number == graph->newest && begin_ns < graph->newest_ns))
		graph->newest_ns = begin_ns;
	if (number > graph->newest)
		graph->newest = number;
	return NULL;
}

/* By its id, or since there is no other. */
static struct graph *graph_of(const struct cupti_kernel *kernel)
{
	struct graph *graph = find_graph(kernel->graph, false);

	for (int at = 0; !graph && graph_count == 1 && at < (int)MOST_GRAPHS; at++)
		if (graphs[at].key)
			graph = &graphs[at];
	return graph;
}

/* By the turn of its node; 0: unknown. */
static uint64_t launch_by_order(const struct cupti_kernel *kernel, struct node *node,
				uint64_t begin_ns)
{
	struct graph *graph = node ? graph_of(kernel) : NULL;
	const struct launch *launch;

	if (!graph || misses_launches || misses_kernels)
		return 0;
	launch = slot_of_turn(graph, node->turns - 1);
	if (launch->graph != graph || launch->turn != node->turns - 1)
		return 0;
	if (begin_ns + SLACK_NS >= launch->at_ns)
		return launch->launch;
	/* Of a launch before the session. */
	node->turns--;
	return 0;
}

uint64_t graphs_launch_of(const struct cupti_kernel *kernel, uint64_t begin_ns)
{
	uint64_t launch = launch_of(kernel->correlation);
	bool is_late = false;
	struct node *node;
	const char *why;

	if (!kernel->graph)
		return launch;
	node = kernel->node ? find_node(kernel->node) : NULL;
	if (node) {
		node->turns++;
		is_late = kernel->start < node->newest;
		if (!is_late)
			node->newest = kernel->start;
	}
	if (!is_wrong) {
		why = launch ? refute(launch, kernel, begin_ns) : NULL;
		if (!why)
			return launch;
		is_wrong = true;
		tell_error(ERROR_GRAPH_IDS, 0, why);
	}
	launch = is_late ? 0 : launch_by_order(kernel, node, begin_ns);
	if (!launch)
		losses_add(LOSS_GRAPH_IDS, 1);
	return launch;
}

bool graphs_doubt(uint64_t launch)
{
	return is_wrong && launch && by_number[launch % MOST_LAUNCHES].launch == launch;
}
