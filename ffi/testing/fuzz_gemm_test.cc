#include "ffi/gemm/handlers.h"
#include "ffi/testing/fuzz.h"

int main(int argc, char** argv) { return moe_lb::testing::FuzzMain(moe_lb::GemmRegistrations(), argc, argv); }
