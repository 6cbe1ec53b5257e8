/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches three kernels from four sites, and knows what each site has launched: blocks, of which the
 * stand-in of the driver (tests/standin) takes a microsecond each. Arguments: rounds; or "steps" and a
 * file to which a line is appended for each hundred of them, as tests/device/workload.py does, until it
 * is killed: so it runs on a real device, where its blocks take what they take. Given rounds, it
 * waits for a line before the first, and for another one after it.
 *
 * In a round, on two streams and without waiting, often() launches `scale` with three times the blocks
 * of seldom(), once() launches `fill`, and replay() a graph of `scale` and `reduce`, which
 * build() has captured. Every tenth round is waited for.
 */
#include <cuda_runtime.h>

extern "C" {
#include "truth.h"
}

enum { UNIT = 40, NS_OF_BLOCK = 1000, ROUNDS_OF_STEP = 100, LAUNCHES_OF_ROUND = 4, ABSENT = 77 };

__global__ void scale(float *data)
{
	data[threadIdx.x] *= 2;
}

__global__ void fill(float *data)
{
	data[threadIdx.x] = 1;
}

__global__ void reduce(float *data)
{
	for (int at = 0; at < 32; at++)
		data[0] += data[at];
}

static float *data;
static cudaStream_t streams[2];
static cudaGraphExec_t graph;

static NOINLINE void often()
{
	scale<<<3 * UNIT, 32, 0, streams[0]>>>(data);
	__asm__ volatile("");
}

static NOINLINE void seldom()
{
	scale<<<UNIT, 32, 0, streams[1]>>>(data);
	__asm__ volatile("");
}

static NOINLINE void once()
{
	fill<<<2 * UNIT, 32, 0, streams[1]>>>(data);
	__asm__ volatile("");
}

static NOINLINE void build()
{
	cudaGraph_t built;

	cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal);
	scale<<<2 * UNIT, 32, 0, streams[0]>>>(data);
	reduce<<<UNIT, 32, 0, streams[0]>>>(data);
	if (cudaStreamEndCapture(streams[0], &built))
		fail("capture");
	cudaGraphInstantiate(&graph, built, 0);
}

static NOINLINE void replay()
{
	cudaGraphLaunch(graph, streams[0]);
	__asm__ volatile("");
}

/* Who comes late sees the context by its first launch. Called: each site stays one address. */
static NOINLINE void after_round(long round, bool waits)
{
	if (!waits || round)
		return;
	while (getchar() != '\n') /* of the line that let it begin */
		;
	ready_then_wait();
}

static void play(long rounds, bool waits)
{
	for (long round = 0; round < rounds; round++) {
		often();
		seldom();
		once();
		replay();
		after_round(round, waits);
		if (round % 10 == 9)
			cudaDeviceSynchronize();
	}
}

static void play_steps(const char *path)
{
	FILE *steps = fopen(path, "a");

	if (!steps)
		fail(path);
	for (long launches = 0;;) {
		long long begun_ns = clock_ns(CLOCK_MONOTONIC), ended_ns;

		play(ROUNDS_OF_STEP, false);
		if (cudaGetLastError())
			fail("a kernel");
		launches += ROUNDS_OF_STEP * LAUNCHES_OF_ROUND;
		ended_ns = clock_ns(CLOCK_MONOTONIC);
		fprintf(steps, "%lld %lld %ld\n", ended_ns, ended_ns - begun_ns, launches);
		fflush(steps);
	}
}

int main(int count, char **arguments)
{
	bool has_steps = count > 2;
	long rounds = count > 1 ? atol(arguments[1]) : 1;

	int error = cudaMalloc((void **)&data, 32 * sizeof(*data));
	if (error) {
		fprintf(stderr, "no device: CUDA's error %d\n", error);
		return ABSENT;
	}
	cudaStreamCreate(&streams[0]);
	cudaStreamCreate(&streams[1]);
	if (!has_steps)
		ready_then_wait();
	build();
	if (has_steps)
		play_steps(arguments[2]);
	play(rounds, true);
	cudaDeviceSynchronize();
	say("often.ns", rounds * 3 * UNIT * NS_OF_BLOCK);
	say("seldom.ns", rounds * UNIT * NS_OF_BLOCK);
	say("once.ns", rounds * 2 * UNIT * NS_OF_BLOCK);
	say("replay.ns", rounds * 3 * UNIT * NS_OF_BLOCK);
	done_then_stay();
	return 0;
}
