// The parts of the zip format that torch.save archives use: sizes and signatures.
#pragma once

#include <cstdint>

namespace tilestone::archive::zip {

inline constexpr uint32_t kLocalHeader = 0x04034b50;
inline constexpr uint32_t kDescriptor = 0x08074b50;
inline constexpr uint32_t kCentralHeader = 0x02014b50;
inline constexpr uint32_t kEnd = 0x06054b50;
inline constexpr uint32_t kEnd64 = 0x06064b50;
inline constexpr uint32_t kLocator64 = 0x07064b50;

// Sizes in bytes without names, extra fields and comments.
inline constexpr uint64_t kLocalHeaderSize = 30;
inline constexpr uint64_t kCentralHeaderSize = 46;
inline constexpr uint64_t kEndSize = 22;
inline constexpr uint64_t kEnd64Size = 56;
inline constexpr uint64_t kLocator64Size = 20;

inline constexpr uint16_t kStored = 0;
inline constexpr uint16_t kFlagEncrypted = 1u << 0;
inline constexpr uint16_t kFlagDescriptor = 1u << 3;  // CRC and sizes follow the data
inline constexpr uint16_t kFlagUtf8 = 1u << 11;
inline constexpr uint16_t kExtra64 = 0x0001;
inline constexpr uint16_t kExtraPadding = 0x4246;  // "FB"

// A field with this value means that the number is in the zip64 field.
inline constexpr uint32_t kMax32 = 0xffffffff;
inline constexpr uint16_t kMax16 = 0xffff;

}  // namespace tilestone::archive::zip
