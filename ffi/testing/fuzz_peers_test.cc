#include "ffi/testing/fuzz.h"
#include "ffi/transport/peer_handlers.h"

int main(int argc, char** argv) { return moe_lb::testing::FuzzMain(moe_lb::PeerRegistrations(), argc, argv); }
