//! Configuration of an engine.

use std::time::Duration;

use crate::session::Timing;

/// Configuration of a [`Client`](super::Client).
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    pub(super) pool: usize,
    pub(super) spin: Duration,
    pub(super) timing: Timing,
    pub(super) queue_size: u16,
    pub(super) max_immediate: u32,
    pub(super) region_segments: u32,
    pub(super) max_requests: usize,
    pub(super) port: Option<u64>,
    pub(super) guid: Option<u64>,
    pub(super) recovers: bool,
    pub(super) noted: Option<[u8; 16]>,
}

impl Default for ClientBuilder {
    fn default() -> Self {
        Self {
            pool: 64 << 20,
            spin: Duration::from_micros(50),
            timing: Timing::default(),
            queue_size: 64,
            max_immediate: 8192,
            region_segments: 64,
            max_requests: 1024,
            port: None,
            guid: None,
            recovers: false,
            noted: None,
        }
    }
}

impl ClientBuilder {
    /// Length of the buffer pool, in bytes. Default: 64 MiB.
    #[must_use]
    pub fn pool(mut self, bytes: usize) -> Self {
        self.pool = bytes;
        self
    }

    /// Duration of polling after the thread's last work, before it sleeps. Default: 50 µs.
    #[must_use]
    pub fn spin(mut self, span: Duration) -> Self {
        self.spin = span;
        self
    }

    /// Waits and intervals of sessions.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Commands outstanding on a channel, unless the address has another number. Default: 64.
    #[must_use]
    pub fn queue_size(mut self, commands: u16) -> Self {
        self.queue_size = commands.max(1);
        self
    }

    /// Longest data that travels within a command, in bytes; 0: none. Default: 8 KiB.
    #[must_use]
    pub fn max_immediate(mut self, bytes: u32) -> Self {
        self.max_immediate = bytes;
        self
    }

    /// Pieces of a buffer that one registration covers; a buffer of more needs more descriptors.
    /// Default: 64, or as many as the device can.
    #[must_use]
    pub fn region_segments(mut self, segments: u32) -> Self {
        self.region_segments = segments.max(1);
        self
    }

    /// Seed of the identifiers of its initiator ports, for a client of one disk. Two such clients
    /// with the same seed are one initiator in two lives: the later login ends the earlier session.
    /// Default: random, and another one for each session.
    #[must_use]
    pub fn port(mut self, seed: u64) -> Self {
        self.port = Some(seed);
        self
    }

    /// Says whether [`Self::port`] is that of an earlier life which ended without closing its
    /// sessions: its commands may still be on their way. Default: no.
    #[must_use]
    pub fn recovers(mut self, recovers: bool) -> Self {
        self.recovers = recovers;
        self
    }

    /// GUID of its initiator ports of SRP, as [`Session::port_guid`](super::Session::port_guid) gave
    /// it in the earlier life: the device may have another by now, as a software NIC has at another
    /// address, and the target would not know that the old session is to end. Default: the device's.
    #[must_use]
    pub fn guid(mut self, guid: Option<u64>) -> Self {
        self.guid = guid;
        self
    }

    /// Generation of its unit's cache that the earlier life had noted
    /// ([`SessionReport::cache`](super::SessionReport::cache)). If the unit has another, the first
    /// flush fails, since acknowledged writes may be lost. Default: not known.
    #[must_use]
    pub fn noted_cache(mut self, generation: Option<[u8; 16]>) -> Self {
        self.noted = generation;
        self
    }
}
