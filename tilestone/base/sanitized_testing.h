// Whether a test runs under ASan or TSan, where everything takes several times as long.
#pragma once

namespace tilestone {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
// clang defines no macros for this, but has __has_feature.
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace tilestone
