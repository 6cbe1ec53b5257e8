/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library of pygraph.py: captures two kernels into a graph and launches it. A block takes a
 * microsecond on the stand-in of the driver (tests/standin).
 */
#include <cuda_runtime.h>

#define NOINLINE __attribute__((noinline))

__global__ void scale(float *data)
{
	data[threadIdx.x] *= 2;
}

__global__ void reduce(float *data)
{
	for (int at = 0; at < 32; at++)
		data[0] += data[at];
}

static cudaStream_t stream;
static cudaGraphExec_t graph;

extern "C" {
int prepare()
{
	return cudaStreamCreate(&stream);
}

int begin_capture()
{
	return cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
}

NOINLINE void run_scale(int blocks)
{
	scale<<<blocks, 32, 0, stream>>>(nullptr);
	__asm__ volatile("");
}

NOINLINE void mlp_forward(int blocks)
{
	reduce<<<blocks, 32, 0, stream>>>(nullptr);
	__asm__ volatile("");
}

int end_capture()
{
	cudaGraph_t built;

	return cudaStreamEndCapture(stream, &built) || cudaGraphInstantiate(&graph, built, 0);
}

NOINLINE int launch_graph()
{
	return cudaGraphLaunch(graph, stream);
}

int wait()
{
	return cudaDeviceSynchronize();
}
}
