// SPDX-License-Identifier: Apache-2.0

// A goroutine that computes in C, which runs on its thread's own stack.
package main

/*
static unsigned long spin_in_c(unsigned long rounds)
{
	unsigned long sum = 1;

	for (unsigned long i = 0; i < rounds; i++)
		sum = sum * 6364136223846793005UL + i;
	return sum;
}
*/
import "C"

import (
	"bufio"
	"fmt"
	"os"
	"time"
)

//go:noinline
func call(end time.Time) (sum uint64) {
	for time.Now().Before(end) {
		sum += uint64(C.spin_in_c(1 << 22))
	}
	return sum
}

func main() {
	fmt.Println("ready")
	input := bufio.NewReader(os.Stdin)
	input.ReadString('\n')
	done := make(chan uint64)
	go func() { done <- call(time.Now().Add(time.Second)) }()
	fmt.Fprintln(os.Stderr, <-done)
	fmt.Println("done")
	input.ReadString('\n')
}
