// The handlers of this directory, for the module that hands them to JAX.
//
// Handlers keep no state (those of `loopback.cc` work on the one group of the process) and trust no
// operand: what depends on shapes and types alone is an error
// when it is wrong, and counts and indices can never lead outside a buffer. Rows that no group owns
// are neither read nor written.
#pragma once

#include "ffi.h"

namespace jaxmoe {

XLA_FFI_DECLARE_HANDLER_SYMBOL(kGroupedGemmContiguous);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kGroupedGemmMasked);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kPermuteContiguous);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kPermuteMasked);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kUnpermute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kGemm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kGemmByHead);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kSiluAndMulContiguous);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kSiluAndMulMasked);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kMlaPrefill);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kMlaDecode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kHoldUntil);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpRank);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpDispatchStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpNormalDispatchFinish);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpLowLatencyDispatchFinish);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpCombineStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kEpCombineFinish);

}  // namespace jaxmoe
