/* The state of the machine's devices, in a file that all processes map; testing/null_cuda/books.py
 * has the same layout. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 16, MAX_ENTRIES = 512, MAX_FAULTS = 16 };

struct device {
    uint64_t total_bytes;
    uint64_t busy_bytes;     /* of a process that is none of ours */
    uint64_t error;          /* a cudaError_t that every call on it returns from now on */
    char uuid[64];           /* GPU-... or MIG-... */
    char name[64];
};

struct entry {               /* what a process holds on a device */
    int64_t pid;             /* 0: unused */
    int64_t device;
    uint64_t bytes;
    uint64_t gone_at_ms;     /* when its end was noticed */
};

struct books {
    uint64_t devices;
    uint64_t context_bytes;  /* of each process on each device that it uses */
    uint64_t reclaim_ms;     /* after a process has ended until its memory is free again */
    uint64_t fired[MAX_FAULTS];
    struct device device[MAX_DEVICES];
    struct entry entry[MAX_ENTRIES];
};

/* Maps the file that NULL_CUDA_BOOKS names; a process without it has no device. */
struct books *books_open(void);
void books_lock(void);
void books_unlock(void);
/* What is in use on a device, all processes together. Called with the lock held. */
uint64_t books_used(struct books *books, int device);
/* Adds to what this process holds; 0 if the device has not got so much. Takes the lock. */
int books_take(int device, uint64_t bytes);
void books_give(int device, uint64_t bytes);
