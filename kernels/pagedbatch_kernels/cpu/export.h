// How functions are exported to Python: library.py declares the same structs and functions, and checks the sizes.

#pragma once

#include "vec.h"

#define PAGEDBATCH_EXPORT_SIZE(STRUCT) \
  extern "C" int64_t pagedbatch_sizeof_##STRUCT() { return sizeof(pagedbatch::STRUCT); }

namespace pagedbatch {

//! Calls `body` with a value of type T: BFloat16 or float.
template <class Body>
void dispatch_dtype(int32_t is_bfloat16, Body body) {
  if (is_bfloat16) {
    body(BFloat16());
  } else {
    body(0.0f);
  }
}

}  // namespace pagedbatch
