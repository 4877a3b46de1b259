// Stands for the libraries that DeepEP's extension was linked with and its launchers never call. The
// loader resolves functions when they are first called, but data when the extension is opened: these
// are all the data symbols it needs from them.
#define JAXMOE_STUB(index, name)                       \
  extern "C" __attribute__((visibility("default"))) \
  char jaxmoe_stub_##index[256] __asm__(name);         \
  char jaxmoe_stub_##index[256] = {}

JAXMOE_STUB(0, "THPDtypeType");
JAXMOE_STUB(1, "_ZN3c1019UndefinedTensorImpl10_singletonE");
JAXMOE_STUB(2, "_ZN3c104impl26device_guard_impl_registryE");
JAXMOE_STUB(3, "_ZTIN3c105ErrorE");
JAXMOE_STUB(4, "_ZTVN3c105ErrorE");
JAXMOE_STUB(5, "_ZTVN5torch8autograd12AutogradMetaE");
