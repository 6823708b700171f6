//! Congestion window for a requester: limits the number of unacknowledged packets.
//!
//! With go-back-N, all packets after a lost packet are sent again, so the cost of a loss is about
//! one window, regardless of the packet size. The overhead therefore depends on the number of round
//! trips between two losses. We adjust the window so that there are several dozen:
//!
//! ```text
//! slow start            below the threshold: add 1 packet per acknowledged packet
//! avoidance             above the threshold: add 1/45, doubled after every 64 round trips
//!                       without a cut, so that new capacity on the path is soon used
//! lost packet           reduce by 1/2, at most once per round trip; set the threshold
//! marked packet         reduce by 1/8, or 1/2 during slow start; set the threshold
//! timeout               same as a lost packet, then slow start from a few packets
//! ```
//!
//! The window is only increased if it was used, so it will not grow on an idle connection.
//!
//! # Less than one packet
//!
//! If a port is shared by more flows than it can buffer packets, it will overflow even with a
//! window of a single packet per flow. For this reason, the window can be a fraction of a packet,
//! with a minimum of [`MIN_WINDOW`]. In this case, only one packet is in flight and the next one is
//! sent after the round trip time divided by the window ([`Congestion::gap`]). This is also the
//! minimum rate, so a connection cannot be stopped by any number of losses.

use std::time::Duration;

/// Window size of one packet.
const PACKET: u32 = 1 << 16;

/// Minimum window: 1/16 of a packet.
const MIN_WINDOW: u32 = PACKET / 16;

/// Initial window in bytes, and its limits in packets (as in RFC 6928).
const INITIAL_BYTES: u32 = 16 << 10;
const INITIAL_PACKETS: std::ops::RangeInclusive<u32> = 4..=16;

/// Maximum number of packets in flight after a timeout.
pub const RECOVERY_WINDOW: u32 = 4;

/// Window increase per acknowledged packet above the threshold, if the window is at least one
/// packet.
const GAIN: u32 = PACKET / 45;

/// Number of round trips without a cut before the gain is doubled.
const QUIET_ROUNDS: u32 = 64;

/// Slow start continues up to the maximum, even if that is changed later.
const NO_THRESHOLD: u32 = u32::MAX;

/// Maximum time between two packets when limited by the window.
const MAX_GAP: Duration = Duration::from_millis(2);

/// Congestion window. Uses the packet numbers of the requester.
#[derive(Clone, Copy, Debug)]
pub(super) struct Congestion {
    /// Current window. This and the next two fields are in units of 1/[`PACKET`].
    window: u32,
    /// Slow start threshold, or [`NO_THRESHOLD`] before the first cut.
    threshold: u32,
    max: u32,
    /// Signals for packets before this number belong to the previous cut.
    recover: u64,
    /// Last packet number of the current round trip, followed by the number of round trips since
    /// the last cut.
    round_end: u64,
    rounds: u32,
    /// Set if the last cut was caused by a mark, which means that routers on the path will mark
    /// packets before dropping them.
    is_marking: bool,
}

impl Congestion {
    /// Creates a window with a maximum of `max` packets of `mtu` bytes.
    pub(super) fn new(max: u32, mtu: u32) -> Self {
        // We use bytes because the limit on the path is the queue size, so this allows a higher
        // number of small packets.
        let initial =
            (INITIAL_BYTES / mtu.max(1)).clamp(*INITIAL_PACKETS.start(), *INITIAL_PACKETS.end());
        let max = window_of(max);
        Self {
            window: max.min(initial * PACKET),
            threshold: NO_THRESHOLD,
            max,
            recover: 0,
            round_end: 0,
            rounds: 0,
            is_marking: false,
        }
    }

    /// Sets the maximum window in packets.
    pub(super) fn set_max(&mut self, max: u32) {
        let max = window_of(max);
        self.max = max;
        self.window = self.window.min(max);
    }

    /// Returns the number of packets that can be in flight, which is at least one.
    pub(super) fn packets(&self) -> u32 {
        (self.window / PACKET).max(1)
    }

    /// Returns true if the window is less than one packet.
    pub(super) fn is_partial(&self) -> bool {
        self.window < PACKET
    }

    /// Returns the time to wait between two packets if the window is less than one packet.
    pub(super) fn gap(&self, round_trip: Duration) -> Option<Duration> {
        (self.window < PACKET).then(|| {
            // The measured round trip can include a long queueing delay, which must not increase
            // the gap.
            let gap = round_trip * PACKET / self.window;
            gap.min(MAX_GAP)
        })
    }

    /// Updates the window when `packets` packets up to `una` have been acknowledged. `nxt` is the
    /// next packet to send.
    pub(super) fn on_progress(&mut self, packets: u32, una: u64, nxt: u64) {
        // Don't increase a window that wasn't fully used.
        let in_flight = nxt.saturating_sub(una) + u64::from(packets);
        // We only require that half of the window was in flight, as some of it may already have
        // been acknowledged.
        if self.window == self.max || in_flight * 2 < u64::from(self.packets()) {
            return;
        }
        if self.window < self.threshold {
            let wider = self.window.saturating_add(packets.saturating_mul(PACKET));
            self.window = wider.min(self.threshold).min(self.max);
            return;
        }
        // A round trip is complete when the packets sent at its start have been acknowledged.
        if una >= self.round_end {
            self.round_end = nxt;
            self.rounds = self.rounds.saturating_add(1);
        }
        // Limited because at 64 times the gain, the window already grows as fast as during slow
        // start.
        let doublings = (self.rounds / QUIET_ROUNDS).min(6);
        let gain = match (self.is_marking, self.is_partial()) {
            // Without marks, the only signal is a loss, which costs a full window of packets. We
            // therefore increase the window by a fraction of its size per round trip. With marks,
            // we add 1/32 of a packet per round trip to stay close to the marking threshold of the
            // router. Below one packet, a round trip consists of a single packet and the gain
            // depends on the window, like the pace.
            (false, false) => GAIN,
            (false, true) => self.window / 200 + PACKET / 500,
            (true, false) => PACKET / 32 / (self.window / PACKET),
            (true, true) => self.window / 64 + PACKET / 128,
        };
        let gain = packets.saturating_mul(gain << doublings);
        let wider = self.window.saturating_add(gain);
        self.window = wider.min(self.max);
    }

    /// Handles the loss of packet `una` as reported by the peer. `nxt` is the next packet that
    /// would have been sent.
    pub(super) fn on_loss(&mut self, una: u64, nxt: u64) {
        // Packets before `recover` were sent with the previous window and have already been
        // accounted for.
        if una >= self.recover {
            self.cut(self.loss(), nxt);
        }
    }

    /// Handles a mark on packet `una` or on its response. Because no packet was lost, the window is
    /// reduced by less.
    pub(super) fn on_mark(&mut self, una: u64, nxt: u64) {
        // If nothing was sent since the last cut, the mark is for packets sent before it.
        if una >= self.recover && nxt > self.recover {
            // During slow start the window doubles per round trip, so it can be twice the path
            // capacity when we receive a mark.
            let end_of_slow_start = self.threshold.min(self.max);
            let part = if self.window < end_of_slow_start {
                2
            } else {
                8
            };
            self.cut(self.window / part, nxt);
            self.is_marking = true;
        }
    }

    /// Handles a timeout, which means that packets must have been lost.
    pub(super) fn on_timeout(&mut self, nxt: u64) {
        // We ignore `recover` here, because a timeout during recovery means that retransmitted
        // packets were lost as well.
        self.cut(self.loss(), nxt);
        // We know nothing about the current path, so we start with a few packets and double the
        // window up to the new threshold.
        self.window = self.window.min(RECOVERY_WINDOW * PACKET);
    }

    fn loss(&self) -> u32 {
        // Below one packet, a round trip consists of a single packet, so halving the window would
        // reduce the rate for every loss.
        if self.is_partial() {
            self.window / 4
        } else {
            self.window / 2
        }
    }

    fn cut(&mut self, by: u32, nxt: u64) {
        self.window = (self.window - by).max(MIN_WINDOW);
        self.threshold = self.window;
        self.recover = nxt;
        self.round_end = nxt;
        self.rounds = 0;
        self.is_marking = false;
    }
}

/// Returns the maximum window for `packets` packets.
fn window_of(packets: u32) -> u32 {
    // We need at least one packet to make progress. The upper limit is required by the fixed-point
    // format.
    packets.clamp(1, u32::MAX / PACKET) * PACKET
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_maximum_limits_window_and_slow_start() {
        let mut window = Congestion::new(8, 4096);
        let (mut una, mut nxt) = (0, 0);
        let mut round = |window: &mut Congestion| {
            let packets = window.packets();
            (una, nxt) = (nxt, nxt + u64::from(packets));
            window.on_progress(packets, una, nxt);
            window.packets()
        };
        while round(&mut window) < 8 {}
        window.set_max(64);
        assert_eq!((round(&mut window), round(&mut window)), (16, 32));
        window.set_max(20);
        assert_eq!(window.packets(), 20);
        assert_eq!(round(&mut window), 20);
        // A threshold set by a loss must be preserved.
        window.on_loss(nxt, nxt);
        window.set_max(64);
        assert_eq!(window.packets(), 10);
    }

    #[test]
    fn ssthresh_survives_smaller_cwnd_limit() {
        let mut window = Congestion::new(64, 4096);
        let (mut una, mut nxt) = (0, 0);
        let mut round = |window: &mut Congestion| {
            let packets = window.packets();
            (una, nxt) = (nxt, nxt + u64::from(packets));
            window.on_progress(packets, una, nxt);
            window.packets()
        };
        while round(&mut window) < 64 {}
        window.on_loss(0, 0);
        window.set_max(32);
        window.set_max(64);
        assert_eq!(
            round(&mut window),
            32,
            "past the threshold it grows by less than a packet"
        );
    }

    /// Acknowledges full windows until `f` returns true. Returns the number of round trips.
    fn rounds_until(c: &mut Congestion, una: &mut u64, f: impl Fn(&Congestion) -> bool) -> u32 {
        let mut rounds = 0;
        while !f(c) {
            let packets = c.packets();
            *una += u64::from(packets);
            c.on_progress(packets, *una, *una);
            rounds += 1;
            assert!(rounds < 100_000, "{c:?}");
        }
        rounds
    }

    #[test]
    fn slow_start_doubles_window_per_round_trip() {
        let mut c = Congestion::new(41, 1024);
        assert_eq!(c.packets(), 16);
        assert_eq!(rounds_until(&mut c, &mut 0, |c| c.packets() == 41), 2);
        assert_eq!(Congestion::new(120, 4096).packets(), 4);
        assert_eq!(Congestion::new(3, 4096).packets(), 3);
    }

    #[test]
    fn loss_halves_window_once_per_round_trip() {
        let (mut c, mut una) = (Congestion::new(16, 1024), 0);
        rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        c.on_loss(una, una + 16);
        c.on_loss(una + 15, una + 31);
        assert_eq!(c.packets(), 8);
        let rounds = rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        assert!((25..64).contains(&rounds), "{rounds}");
        c.on_loss(una, una);
        c.on_loss(una, una);
        assert_eq!(c.packets(), 4);
    }

    #[test]
    fn mark_reduces_window_once_per_round_trip() {
        let mut c = Congestion::new(64, 1024);
        let mut una = 0;
        c.on_mark(una, 16);
        c.on_mark(una + 1, 17);
        assert_eq!(c.packets(), 8, "slow start was too fast");
        rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        c.on_mark(una, una + 16);
        c.on_mark(una + 15, una + 31);
        assert_eq!(c.packets(), 14);
        let idle = una + 31;
        c.on_mark(idle, idle);
        let before = c.packets();
        (0..10).for_each(|_| c.on_mark(idle, idle));
        assert_eq!(c.packets(), before, "nothing was sent since");
        for n in 1..1000 {
            c.on_mark(idle + n, idle + n + 1);
        }
        assert!(c.gap(Duration::from_micros(50)) <= Some(Duration::from_micros(800)));
    }

    #[test]
    fn unused_window_does_not_grow() {
        let mut c = Congestion::new(120, 1024);
        for una in 0..1000 {
            c.on_progress(1, una, una);
        }
        assert_eq!(c.packets(), 16);
    }

    #[test]
    fn repeated_losses_do_not_stop_connection() {
        let mut c = Congestion::new(120, 1024);
        for una in 0..1000 {
            c.on_loss(una, una);
            c.on_timeout(una);
        }
        assert_eq!(c.packets(), 1);
        let trip = Duration::from_micros(50);
        assert_eq!(c.gap(trip), Some(trip * 16));
        assert_eq!(c.gap(Duration::from_secs(1)), Some(MAX_GAP));
        // When there are no more marks, the path should soon be fully used again.
        let mut una = 1000;
        let packets = rounds_until(&mut c, &mut una, |c| !c.is_partial());
        assert!(packets < 200, "{packets}");
        assert_eq!(c.gap(trip), None);
        let rounds = rounds_until(&mut c, &mut una, |c| c.packets() == 120);
        assert!(rounds < 300, "{rounds}");
    }
}
