// The one header of Tilestone's C++ interface.
#pragma once

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/mpi.h"
#include "tilestone/comm/solo.h"
#include "tilestone/comm/threads.h"
#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/gc.h"
#include "tilestone/engine/load.h"
#include "tilestone/engine/save.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/memory_storage.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/version.h"
