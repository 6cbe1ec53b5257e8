// SPDX-License-Identifier: Apache-2.0
// The kernels of inference.py. Lines are read in a flame graph: one thing each.

__kernel void matmul(__global const float *left, __global const float4 *right,
		     __global float4 *out, int depth, int columns)
{
	int column = get_global_id(0), row = get_global_id(1);
	float4 sum = 0.0f;

	for (int k = 0; k < depth; k++)
		sum += left[row * depth + k] * right[k * columns + column];
	out[row * columns + column] = sum;
}

__kernel void softmax(__global float *values, int columns)
{
	__global float *row = values + get_global_id(0) * columns;
	float largest = row[0], sum = 0.0f;

	for (int i = 1; i < columns; i++)
		largest = fmax(largest, row[i]);
	for (int i = 0; i < columns; i++) {
		row[i] = exp(row[i] - largest);
		sum += row[i];
	}
	for (int i = 0; i < columns; i++)
		row[i] /= sum;
}

__kernel void gelu(__global float *values)
{
	float x = values[get_global_id(0)];
	float cubed = x * x * x;

	x *= 0.5f * (1.0f + tanh(0.79788456f * (x + 0.044715f * cubed)));
	values[get_global_id(0)] = x;
}

__kernel void layer_norm(__global float *values, int columns)
{
	__global float *row = values + get_global_id(0) * columns;
	float mean = 0.0f, variance = 0.0f, scale;

	for (int i = 0; i < columns; i++)
		mean += row[i] / columns;
	for (int i = 0; i < columns; i++)
		variance += (row[i] - mean) * (row[i] - mean) / columns;
	scale = rsqrt(variance + 1e-5f);
	for (int i = 0; i < columns; i++)
		row[i] = (row[i] - mean) * scale;
}
