//! The end of a process without any warning to it, at a moment that it chooses itself.

use std::sync::atomic::{AtomicU64, Ordering};

/// Kills this process after so many handled messages.
pub(crate) struct CrashAfter {
    most: Option<u64>,
    handled: AtomicU64,
}

impl CrashAfter {
    pub(crate) fn new(most: Option<u64>) -> Self {
        Self {
            most,
            handled: AtomicU64::new(0),
        }
    }

    /// A handler is about to return with success. The one after the last that is allowed does not: so the process dies
    /// in the middle of its transaction.
    pub(crate) fn count(&self) {
        let before = self.handled.fetch_add(1, Ordering::Relaxed);
        if self.most.is_some_and(|most| before >= most) {
            eprintln!("killing this process after {before} handled messages");
            now();
        }
    }
}

/// SIGKILL: nothing is flushed, closed or rolled back.
pub(crate) fn now() -> ! {
    #[cfg(unix)]
    {
        use rustix::process::{Signal, getpid, kill_process};
        // It does not return if it succeeds, and nothing forbids it.
        let _ = kill_process(getpid(), Signal::KILL);
    }
    std::process::abort()
}
