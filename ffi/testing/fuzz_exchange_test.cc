#include "ffi/testing/fuzz.h"
#include "ffi/transport/handlers.h"

int main(int argc, char** argv) { return moe_lb::testing::FuzzMain(moe_lb::ExchangeRegistrations(), argc, argv); }
