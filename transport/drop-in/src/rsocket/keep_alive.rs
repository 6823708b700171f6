//! `SO_KEEPALIVE`: idle connections are tried once in a while.
//!
//! A write without bytes is enough: where the other end is gone, the queue pair notices it.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::socket::find;
use crate::errno::Errno;
use crate::lock::unpoisoned;
use crate::thread;

/// Sockets, and when they are tried next.
static TIMES: Mutex<Vec<(c_int, Instant)>> = Mutex::new(Vec::new());

/// Wakes the thread for a change of the list, which it serves while the list is not empty.
static CHANGE: Condvar = Condvar::new();

/// Begins to try a socket, at its interval from now on; the first one makes the thread.
///
/// # Errors
/// Those of making a thread.
pub(super) fn begin(number: c_int, interval: Duration) -> Result<(), Errno> {
    let mut times = unpoisoned(TIMES.lock());
    if times.is_empty() {
        thread::spawn("riser-keepalive".into(), run)?;
    }
    times.retain(|(other, _)| *other != number);
    times.push((number, Instant::now() + interval));
    CHANGE.notify_one();
    Ok(())
}

/// The thread.
fn run() {
    let mut times = unpoisoned(TIMES.lock());
    while let Some(next) = times.iter().map(|(_, at)| *at).min() {
        let now = Instant::now();
        if next > now {
            let waited = CHANGE.wait_timeout(times, next - now);
            times = unpoisoned(waited).0;
            continue;
        }
        let due: Vec<c_int> = times.iter().filter(|t| t.1 <= now).map(|t| t.0).collect();
        // No socket is locked while the list is, since sockets put themselves on it.
        drop(times);
        let next: Vec<_> = due.iter().map(|n| (*n, attempt(*n))).collect();
        times = unpoisoned(TIMES.lock());
        times.retain(|(number, at)| *at > now || !due.contains(number));
        let known = |n: &c_int, times: &[(c_int, Instant)]| times.iter().any(|t| t.0 == *n);
        for (number, interval) in next {
            if let Some(interval) = interval.filter(|_| !known(&number, &times)) {
                times.push((number, Instant::now() + interval));
            }
        }
    }
}

/// Tries a socket; answers when it is to be tried again.
fn attempt(number: c_int) -> Option<Duration> {
    let socket = find(number)?;
    let inner = &mut *socket.lock();
    let connection = inner.kind.stream().ok()?;
    if !connection.options.keeps_alive {
        return None;
    }
    if connection.outcome().is_ok() {
        connection.link().keep_alive();
    }
    Some(Duration::from_secs(connection.options.keep_idle.into()))
}
