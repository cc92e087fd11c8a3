/* The part of HIP's ABI that callers see; numbers as HIP documents them. */
#ifndef HIPEMU_HIP_ABI_H
#define HIPEMU_HIP_ABI_H

#include <stddef.h>

#define API __attribute__((visibility("default")))

typedef int hipError_t;

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  MAP_FAILED_ = 205,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  HOST_MEMORY_NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801
};

enum { MEMORY_UNREGISTERED = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

typedef struct {
  char bytes[64];
} ipc_handle; /* hipIpcMemHandle_t, hipIpcEventHandle_t */

typedef struct { /* hipPointerAttribute_t since HIP 6 */
  int type;
  int device;
  void *devicePointer, *hostPointer;
  int isManaged;
  unsigned allocationFlags;
} pointer_attributes;

enum { PROPERTIES_BYTES = 1472, PROPERTIES_TOTAL_MEMORY = 288, PROPERTIES_ARCH_NAME = 1160 };

enum { EVENT_INTERPROCESS = 4 };

#endif
