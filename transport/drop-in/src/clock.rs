//! The device's clock: the system's monotonic one, in nanoseconds.

use libc::{CLOCK_MONOTONIC, CLOCK_REALTIME, clockid_t, timespec};

/// Frequency of the device's clock, in kHz as `hca_core_clock` gives it.
pub(crate) const KHZ: u64 = 1_000_000;

/// Bits of a timestamp that count.
pub(crate) const MASK: u64 = u64::MAX;

/// The device's time, in nanoseconds.
pub(crate) fn device_time() -> u64 {
    read(CLOCK_MONOTONIC)
}

/// Time of day, in nanoseconds since 1970.
pub(crate) fn wall_time() -> u64 {
    read(CLOCK_REALTIME)
}

fn read(clock: clockid_t) -> u64 {
    let mut now = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the place is valid. Both clocks exist, so the call cannot fail.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    // Neither is negative, and 64 bits last for centuries.
    (now.tv_sec as u64) * 1_000_000_000 + now.tv_nsec as u64
}
