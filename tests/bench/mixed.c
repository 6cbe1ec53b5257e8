/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The native part of mixed.py: two functions of known names that call each other, without frame
 * pointers or debug information, as an extension module has them.
 */

#define NEVER_INLINE __attribute__((noinline, noipa))

NEVER_INLINE static unsigned long scramble(unsigned long value, long rounds)
{
	for (long i = 0; i < rounds; i++)
		value = value * 6364136223846793005UL + 1442695040888963407UL;
	return value;
}

NEVER_INLINE static unsigned long rotate(unsigned long value, long rounds)
{
	for (long i = 0; i < rounds; i++) {
		value = (value << 7) | (value >> 57);
		__asm__ volatile("" : "+r"(value));
	}
	return value;
}

/* Part of the time in each of the two, a third of it in the second. */
unsigned long churn(long rounds)
{
	return scramble(1, rounds) + rotate(1, rounds);
}
