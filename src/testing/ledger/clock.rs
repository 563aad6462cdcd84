//! The clock of the ledger: nanoseconds that all processes of a machine count alike.
//!
//! Promises that a time read after another, in whatever process, is not smaller. Says nothing
//! about the time of day. `std::time::Instant` is this clock on Linux, but hides its value.

#[cfg(unix)]
mod of_the_system {
    use rustix::time::{ClockId, clock_gettime};

    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub(crate) fn now() -> u64 {
        let time = clock_gettime(ClockId::Monotonic);
        // The clock starts near zero at boot: neither part is negative.
        time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
    }

    /// All processes read the same clock.
    pub(crate) fn shared_by_processes() -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(not(unix))]
mod of_the_system {
    use std::sync::LazyLock;
    use std::time::Instant;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    /// Nanoseconds since the first call in this process.
    pub(crate) fn now() -> u64 {
        let start = *START;
        u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Each process counts from its own start: their files could not be merged.
    pub(crate) fn shared_by_processes() -> std::io::Result<()> {
        Err(std::io::Error::new(
            std::io::ErrorKind::Unsupported,
            "an order ledger of several processes needs CLOCK_MONOTONIC, which this system lacks",
        ))
    }
}

pub(super) use of_the_system::{now, shared_by_processes};
