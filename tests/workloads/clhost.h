/* SPDX-License-Identifier: Apache-2.0 */
/* What the OpenCL workloads share: the first device, and kernels that take a buffer and a count. */
#ifndef AIFLAME_WORKLOADS_CLHOST_H
#define AIFLAME_WORKLOADS_CLHOST_H

#include <stdio.h>
#include <stdlib.h>

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_mem data;

static void check(cl_int error, const char *what)
{
	if (error != CL_SUCCESS) {
		fprintf(stderr, "%s: OpenCL error %d\n", what, error);
		exit(1);
	}
}

static void open_device(size_t items)
{
	cl_platform_id platform;
	cl_int error;

	check(clGetPlatformIDs(1, &platform, NULL), "clGetPlatformIDs");
	check(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL), "clGetDeviceIDs");
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &error);
	check(error, "clCreateContext");
	queue = clCreateCommandQueue(context, device, 0, &error);
	check(error, "clCreateCommandQueue");
	data = clCreateBuffer(context, CL_MEM_READ_WRITE, items * sizeof(float), NULL, &error);
	check(error, "clCreateBuffer");
}

static cl_program build(const char *source, const char *options)
{
	cl_int error;
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &error);

	check(error, "clCreateProgramWithSource");
	check(clBuildProgram(program, 1, &device, options, NULL, NULL), "clBuildProgram");
	return program;
}

static cl_kernel kernel_of(cl_program program, const char *name, cl_int rounds)
{
	cl_int error;
	cl_kernel kernel = clCreateKernel(program, name, &error);

	check(error, name);
	check(clSetKernelArg(kernel, 0, sizeof(data), &data), "clSetKernelArg");
	check(clSetKernelArg(kernel, 1, sizeof(rounds), &rounds), "clSetKernelArg");
	return kernel;
}

static inline __attribute__((always_inline)) void launch(cl_kernel kernel, size_t items)
{
	cl_event end;

	check(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &items, NULL, 0, NULL, &end),
	      "clEnqueueNDRangeKernel");
	check(clWaitForEvents(1, &end), "clWaitForEvents");
	clReleaseEvent(end);
}

#endif
