/* Counts the bytes that torch's CPU allocator holds: the blocks that libc10.so allocates with
 * posix_memalign, until any thread frees them. Loaded with LD_PRELOAD. heap_peak() returns the maximum
 * since its last call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 20) /* size of an open hash table; first_slot() returns 20 bits */
#define NEXT(i) (((i) + 1) & (SLOTS - 1))

static struct {
  uintptr_t address;
  size_t size;
} blocks[SLOTS];
static size_t current, peak;
static uintptr_t first_of_torch, end_of_torch; /* addresses of libc10.so */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static unsigned first_slot(uintptr_t address) {
  return (unsigned)(((uint64_t)(address >> 6) * 0x9E3779B97F4A7C15ull) >> 44);
}

/* Fills the hole with a later block of the same sequence, or a search would stop at the hole. */
static void remove_slot(unsigned hole) {
  for (unsigned i = NEXT(hole); blocks[i].address; i = NEXT(i)) {
    unsigned home = first_slot(blocks[i].address);
    if (((i - home) & (SLOTS - 1)) >= ((i - hole) & (SLOTS - 1))) {
      blocks[hole] = blocks[i];
      hole = i;
    }
  }
  blocks[hole].address = 0;
}

static int note_range(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size, (void)unused;
  if (!info->dlpi_name || !strstr(info->dlpi_name, "libc10.so")) return 0;
  first_of_torch = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    uintptr_t end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && end > end_of_torch) end_of_torch = end;
  }
  return 1;
}

static int asked_by_torch(void *caller) {
  if (!end_of_torch) dl_iterate_phdr(note_range, NULL);
  return (uintptr_t)caller >= first_of_torch && (uintptr_t)caller < end_of_torch;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int error = real_memalign(result, alignment, size);
  if (error || !asked_by_torch(__builtin_return_address(0))) return error;
  pthread_mutex_lock(&lock);
  unsigned i = first_slot((uintptr_t)*result);
  while (blocks[i].address) i = NEXT(i);
  blocks[i].address = (uintptr_t)*result;
  blocks[i].size = size;
  current += size;
  if (current > peak) peak = current;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *pointer) {
  if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
  /* All of the allocator's blocks are aligned to 64 bytes. */
  if (pointer && ((uintptr_t)pointer & 63) == 0) {
    pthread_mutex_lock(&lock);
    unsigned i = first_slot((uintptr_t)pointer);
    while (blocks[i].address && blocks[i].address != (uintptr_t)pointer) i = NEXT(i);
    if (blocks[i].address) {
      current -= blocks[i].size;
      remove_slot(i);
    }
    pthread_mutex_unlock(&lock);
  }
  real_free(pointer);
}

size_t heap_peak(void) {
  pthread_mutex_lock(&lock);
  size_t result = peak;
  peak = current;
  pthread_mutex_unlock(&lock);
  return result;
}
