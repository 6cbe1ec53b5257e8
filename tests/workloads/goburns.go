// SPDX-License-Identifier: Apache-2.0

// Goroutines that compute, in Go and in the assembler of its library, which has no frame pointer.
package main

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"os"
	"sync"
	"time"
)

// The clock is asked seldom: Go reads it on another stack.
//
//go:noinline
func spin(end time.Time) (n int) {
	for time.Now().Before(end) {
		for i := 0; i < 1<<20; i++ {
			n += i * n
		}
	}
	return n
}

//go:noinline
func digest(data []byte, end time.Time) (last byte) {
	for time.Now().Before(end) {
		sum := sha256.Sum256(data)
		last = sum[0]
	}
	return last
}

//go:noinline
func work(data []byte) {
	for i := 0; i < 10; i++ {
		spin(time.Now().Add(50 * time.Millisecond))
		digest(data, time.Now().Add(50*time.Millisecond))
	}
}

func main() {
	fmt.Println("ready")
	input := bufio.NewReader(os.Stdin)
	input.ReadString('\n')
	var all sync.WaitGroup
	for i := 0; i < 2; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			work(make([]byte, 1<<20))
		}()
	}
	all.Wait()
	fmt.Println("done")
	input.ReadString('\n')
}
