//! Configuration of an engine.

use std::time::Duration;

use crate::protection::ProtectionMode;
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
    pub(super) was_redirected: bool,
    pub(super) protection: ProtectionMode,
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
            was_redirected: false,
            protection: ProtectionMode::default(),
        }
    }
}

impl ClientBuilder {
    /// Sets the size of the buffer pool in bytes. Default: 64 MiB.
    #[must_use]
    pub fn pool(mut self, bytes: usize) -> Self {
        self.pool = bytes;
        self
    }

    /// Sets how long the thread polls after its last work before it sleeps. Default: 50 µs.
    #[must_use]
    pub fn spin(mut self, span: Duration) -> Self {
        self.spin = span;
        self
    }

    /// Sets the timeouts and intervals of sessions.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Sets the maximum number of outstanding commands per channel, unless the address specifies
    /// another number. Default: 64.
    #[must_use]
    pub fn queue_size(mut self, commands: u16) -> Self {
        self.queue_size = commands.max(1);
        self
    }

    /// Sets the maximum length of immediate data in bytes; 0 disables immediate data. Default: 8
    /// KiB.
    #[must_use]
    pub fn max_immediate(mut self, bytes: u32) -> Self {
        self.max_immediate = bytes;
        self
    }

    /// Sets the maximum number of buffer segments per registration. A buffer with more segments
    /// needs more descriptors. Default: 64, or the device's limit.
    #[must_use]
    pub fn region_segments(mut self, segments: u32) -> Self {
        self.region_segments = segments.max(1);
        self
    }

    /// Sets the seed for the initiator port identifiers of a client with a single disk. A client
    /// with the same seed as an earlier one is treated as the same initiator: its login terminates
    /// the earlier session. Default: random, with a different identifier for each session.
    #[must_use]
    pub fn port(mut self, seed: u64) -> Self {
        self.port = Some(seed);
        self
    }

    /// Sets whether [`Self::port`] was used by an earlier process that exited without closing its
    /// sessions, so that its commands may still be in flight. Default: false.
    #[must_use]
    pub fn recovers(mut self, recovers: bool) -> Self {
        self.recovers = recovers;
        self
    }

    /// Sets the GUID of the SRP initiator ports, as returned by
    /// [`Session::port_guid`](super::Session::port_guid) in the earlier process. The device's GUID
    /// may have changed since (a software NIC's depends on its address), and then the target would
    /// not recognize that it must terminate the old session. Default: the device's GUID.
    #[must_use]
    pub fn guid(mut self, guid: Option<u64>) -> Self {
        self.guid = guid;
        self
    }

    /// Sets the cache generation of the unit as recorded by the earlier process
    /// ([`SessionReport::cache`](super::SessionReport::cache)). If the unit reports a different
    /// one, the first flush fails, because acknowledged writes may be lost. Default: unknown.
    #[must_use]
    pub fn noted_cache(mut self, generation: Option<[u8; 16]>) -> Self {
        self.noted = generation;
        self
    }

    /// Sets whether a login of the earlier process was redirected to another port
    /// ([`SessionReport::is_redirected`](super::SessionReport::is_redirected)). That port may not
    /// know about the login of this process, so reads and writes wait until its commands have had
    /// time to complete. Default: false.
    #[must_use]
    pub fn was_redirected(mut self, was_redirected: bool) -> Self {
        self.was_redirected = was_redirected;
        self
    }

    /// Sets whether protection information of units is transferred and verified. If it is, a
    /// quarter of the pool is reserved for it, from 64 KiB to 16 MiB, when the first protected
    /// unit is opened, or a smaller share if buffers are in use. This requires a pool of at least
    /// 128 KiB. Default: [`ProtectionMode::Auto`].
    #[must_use]
    pub fn protection(mut self, mode: ProtectionMode) -> Self {
        self.protection = mode;
        self
    }
}
