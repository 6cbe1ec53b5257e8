/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library of three functions, INNER called by OUTER called by enter, whose names and frames its
 * flags choose: libraries that differ in everything can so be given one build id.
 */
#define STEPS 20000

__attribute__((noipa)) long INNER(long x)
{
	char room[ROOM];
	long i;

	__asm__ volatile("" : : "r"(room) : "memory");
	for (i = 0; i < STEPS; i++) {
		x = x * 6364136223846793005 + i;
		__asm__ volatile("" : "+r"(x));
	}
	return x;
}

__attribute__((noipa)) long OUTER(long x)
{
	char room[2 * ROOM + 64];

	__asm__ volatile("" : : "r"(room) : "memory");
	return INNER(x) + 1;
}

__attribute__((noipa)) long enter(long x)
{
	return OUTER(x) * 3;
}
