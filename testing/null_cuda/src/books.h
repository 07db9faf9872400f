/* The state of the machine's devices, in a file that all processes map; testing/null_cuda/books.py
 * has the same layout. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 16, MAX_ENTRIES = 512, MAX_FAULTS = 16 };

struct device {
    uint64_t total_bytes;
    uint64_t busy_bytes;     /* held by a process outside of the test */
    uint64_t error;          /* if not 0: the cudaError_t of every call on this device */
    char uuid[64];           /* GPU-... or MIG-... */
    char name[64];
};

struct entry {               /* what a process holds on a device */
    int64_t pid;             /* 0: unused */
    int64_t device;
    uint64_t bytes;
    uint64_t gone_at_ms;     /* when the end of the process was noticed; 0: not yet */
};

struct books {
    uint64_t devices;
    uint64_t context_bytes;  /* memory of each process on each device that it uses */
    uint64_t reclaim_ms;     /* from the end of a process until its memory is free */
    uint64_t fired[MAX_FAULTS];
    struct device device[MAX_DEVICES];
    struct entry entry[MAX_ENTRIES];
};

/* Maps the file that NULL_CUDA_BOOKS names; NULL, and so no devices, without the variable. */
struct books *books_open(void);
void books_lock(void);
void books_unlock(void);
/* Returns the bytes that all processes hold on a device. The caller holds the lock. */
uint64_t books_used(struct books *books, int device);
/* Allocates memory for this process; returns 0 if it does not fit. Takes the lock. */
int books_take(int device, uint64_t bytes);
void books_give(int device, uint64_t bytes);
