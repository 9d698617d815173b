// All that a crash of the machine, or a call that fails, may leave of some work.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone {

// Does the work on a disk with this hook, also where the machine dies in the middle of it.
using CrashedWork = std::function<std::shared_ptr<FaultDisk>(const FaultHook& hook)>;
// Checks what is left. `number`: how many images came before.
using CrashJudge = std::function<void(const FileImage& image, uint64_t number)>;

// Lets the machine die at each point of the work, with each survival of what is unsynced, and
// judges what is left, as well as what a power loss after the end of the work leaves. A survival
// that leaves a choice is tried with `seeds` seeds. An image that one crash leaves in several ways
// is judged once.
//
// A crash before a call leaves the same as one after the call before it, and a crash after a call
// that changes nothing the same as one before it. So the machine dies before the first call that
// changes the disk, after each of them, and in the middle of each append. A call is found again by
// its number among its client's, because those of several clients overlap. `stride`: only at every
// n-th.
//
// Ends after the first failure. Returns the number of judged images.
uint64_t crash_everywhere(const CrashedWork& work, const CrashJudge& judge, uint64_t stride = 1,
                          uint64_t seeds = 1);

// Lets each call of the work go wrong in each way, and judges what is left once the work is over.
// The call fails and is never executed; its answer is lost; it is executed before the first or the
// seventh call after the one that reported its failure; or it is executed twice. A call that
// changes nothing, or can't come late, has fewer ways. `stride`: only every n-th way, and all with
// $TILESTONE_EVERY_ANSWER.
//
// Ends after the first failure. Returns the number of judged images.
uint64_t fail_everywhere(const CrashedWork& work, const CrashJudge& judge, uint64_t stride = 1);

}  // namespace tilestone
