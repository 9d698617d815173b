// The one header of Tilestone's C++ interface.
#pragma once

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/session.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/format/known/known.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/version.h"
