#include "ffi/testing/fuzz.h"
#include "ffi/transport/peer_planning.h"

int main(int argc, char** argv) { return moe_lb::testing::FuzzMain(moe_lb::PeerPlanningRegistrations(), argc, argv); }
