/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes 23 launches a round in all the ways that the CUDA runtime has, and prints how many by
 * function. It needs no device and no driver: launches fail then, after they were called, and
 * errors are ignored.
 *
 * Arguments: rounds (1).
 *
 * What is counted is what the program calls. Since CUDA 13 a <<<>>> calls __cudaLaunchKernel,
 * which goes on to cudaLaunchKernel.
 */
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

namespace work {

__global__ void scale(float *data, float factor) {
    data[threadIdx.x] *= factor;
}

template <typename T, int Width>
__global__ void fill(T *data, T value) {
    for (int i = 0; i < Width; i++)
        data[threadIdx.x * Width + i] = value;
}

}  // namespace work

extern "C" __global__ void plain(int *data) {
    data[threadIdx.x]++;
}

static __global__ void hidden(int *data) {
    data[threadIdx.x]--;
}

static __attribute__((noinline)) void by_syntax(float *data, int *numbers) {
    for (int i = 0; i < 5; i++)
        work::scale<<<dim3(2, 3, 4), dim3(32, 2, 1)>>>(data, 2.0f);
    for (int i = 0; i < 3; i++)
        work::fill<float, 4><<<8, 64>>>(data, 1.0f);
    work::fill<double, 2><<<8, 64>>>((double *)data, 1.0);
    for (int i = 0; i < 2; i++)
        plain<<<1, 128>>>(numbers);
    hidden<<<1, 32>>>(numbers);
}

static __attribute__((noinline)) void by_call(void **scale_arguments, void **plain_arguments) {
    for (int i = 0; i < 4; i++)
        cudaLaunchKernel((const void *)work::scale, dim3(7), dim3(33), scale_arguments, 0, 0);
    for (int i = 0; i < 2; i++)
        cudaLaunchKernel((const void *)plain, dim3(1), dim3(1), plain_arguments, 64, 0);
}

static __attribute__((noinline)) void by_config(void **arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(5, 6, 7);
    config.blockDim = dim3(8, 4, 2);
    for (int i = 0; i < 3; i++)
        cudaLaunchKernelExC(&config, (const void *)work::scale, arguments);
}

static __attribute__((noinline)) void together(void **arguments) {
    for (int i = 0; i < 2; i++)
        cudaLaunchCooperativeKernel((const void *)work::scale, dim3(2), dim3(64), arguments, 0, 0);
}

int main(int count, char **words) {
    int rounds = count > 1 ? atoi(words[1]) : 1;
    float *data = nullptr;
    int *numbers = nullptr;
    float factor = 3.0f;
    void *scale_arguments[] = {&data, &factor};
    void *plain_arguments[] = {&numbers};

    cudaMalloc(&data, 4096);
    for (int round = 0; round < rounds; round++) {
        by_syntax(data, numbers);
        by_call(scale_arguments, plain_arguments);
        by_config(scale_arguments);
        together(scale_arguments);
        cudaDeviceSynchronize();
    }
    cudaFree(data);
    printf("{\"syntax\": %d, \"cudaLaunchKernel\": %d, \"cudaLaunchKernelExC\": %d, "
           "\"cudaLaunchCooperativeKernel\": %d, \"launches\": %d}\n",
           12 * rounds, 6 * rounds, 3 * rounds, 2 * rounds, 23 * rounds);
    return 0;
}
