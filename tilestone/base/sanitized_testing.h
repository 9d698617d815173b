// Whether a test runs under ASan or TSan, where everything takes several times as long.
#pragma once

namespace tilestone {

#if defined(__has_feature)
// clang defines no macros for this, but has __has_feature.
inline constexpr bool kAddressSanitized = __has_feature(address_sanitizer);
inline constexpr bool kThreadSanitized = __has_feature(thread_sanitizer);
#else
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitized = true;
#else
inline constexpr bool kAddressSanitized = false;
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif
#endif
inline constexpr bool kSanitized = kAddressSanitized || kThreadSanitized;

// Whether tests that try something many times try it less often: under a sanitizer, except in
// `make soak`.
#ifdef TILESTONE_SANITIZE_WHOLE
inline constexpr bool kReduced = false;
#else
inline constexpr bool kReduced = kSanitized;
#endif

// Whether tests use fewer bytes and worlds: under TSan, where large amounts of bytes take ten times
// as long, except in `make soak`.
inline constexpr bool kSlowBytes = kReduced && kThreadSanitized;

}  // namespace tilestone
