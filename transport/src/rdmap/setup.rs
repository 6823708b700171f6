//! Negotiation using request and reply frames (RFC 5044 7.1, RFC 6581 9).
//!
//! We always request CRCs, and allow the responder to send first. In this case our first message is
//! a zero-length RDMA WRITE or READ, as requested by the responder. If a responder doesn't support
//! this, it will not send anything before it has received a message from the initiator.

use thiserror::Error;

use super::wire::fpdu::Framing;
use super::wire::start::{ANY_DEPTH, Enhanced, StartFrame, StartKind};
use super::wire::terminate::Reason;

/// Message sent by the initiator to allow the responder to send (ready to receive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// Empty FPDU.
    Empty,
    /// Zero-length RDMA WRITE.
    Write,
    /// Zero-length RDMA READ.
    Read,
}

/// Requested connection parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Request markers in received data.
    pub markers: bool,
    /// Request CRCs for both directions. They are also used if requested by the peer.
    pub crc: bool,
    /// MPA revision for the request: 1, or 2 with resources.
    pub revision: u8,
    /// Maximum number of incoming RDMA READs and atomics.
    pub ird: u16,
    /// Maximum number of outgoing RDMA READs and atomics.
    pub ord: u16,
}

/// Negotiated parameters, as seen from one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NegotiatedParams {
    /// Framing for sent data.
    pub tx: Framing,
    /// Framing for received data.
    pub rx: Framing,
    /// Maximum number of incoming RDMA READs and atomics.
    pub ird: u16,
    /// Maximum number of outgoing RDMA READs and atomics.
    pub ord: u16,
    /// Initiator: message to send before all other messages.
    pub rtr: Option<Rtr>,
    /// Responder: nothing must be sent before the first message has been received.
    pub awaits_first: bool,
}

/// Reason why the negotiation has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Disagreement {
    /// The revision is not supported.
    #[error("unsupported MPA revision {revision}")]
    Revision {
        /// Revision sent by the peer.
        revision: u8,
    },
    /// The reply does not contain resources even though the request does.
    #[error("resources missing in the reply")]
    NoResources,
    /// The responder requires more RDMA READs than the initiator supports.
    #[error("responder requires too many RDMA READs")]
    Depth,
    /// The responder has not selected a supported first message.
    #[error("responder selected an unsupported first message")]
    Rtr,
}

impl Disagreement {
    /// Returns the reason to be used in a Terminate message.
    #[must_use]
    pub fn reason(self) -> Reason {
        match self {
            Self::Revision { .. } | Self::NoResources => Reason::InvalidStart,
            Self::Depth => Reason::InsufficientIrd,
            Self::Rtr => Reason::NoMatchingRtr,
        }
    }
}

/// Returns the minimum of two RDMA READ limits, where the peer may leave the choice to us.
fn at_most(own: u16, peers: u16) -> u16 {
    match peers {
        ANY_DEPTH => own,
        _ => own.min(peers),
    }
}

/// Creates a request.
#[must_use]
pub fn request(wishes: &Wishes, private_data: Vec<u8>) -> StartFrame {
    StartFrame {
        kind: StartKind::Request,
        markers: wishes.markers,
        crc: wishes.crc,
        rejected: false,
        revision: wishes.revision,
        enhanced: (wishes.revision >= 2).then_some(Enhanced {
            ird: wishes.ird,
            ord: wishes.ord,
            peer_to_peer: true,
            send_rtr: false,
            write_rtr: true,
            read_rtr: true,
        }),
        private_data,
    }
}

/// Creates a reply that rejects a request.
#[must_use]
pub fn refusal(request: &StartFrame, private_data: Vec<u8>) -> StartFrame {
    StartFrame {
        kind: StartKind::Reply,
        markers: false,
        rejected: true,
        revision: request.revision.clamp(1, 2),
        private_data,
        ..request.clone()
    }
}

/// Creates a reply that accepts a request. Returns it with the negotiated parameters.
///
/// # Errors
/// [`Disagreement::Revision`].
pub fn reply(
    request: &StartFrame,
    wishes: &Wishes,
    private_data: Vec<u8>,
) -> Result<(StartFrame, NegotiatedParams), Disagreement> {
    if !matches!(request.revision, 1 | 2) {
        return Err(Disagreement::Revision {
            revision: request.revision,
        });
    }
    let crc = request.crc || wishes.crc;
    let said = request.enhanced;
    let ord = said.map_or(wishes.ord, |said| at_most(wishes.ord, said.ird));
    let ird = said.map_or(wishes.ird, |_| wishes.ird);
    let enhanced = said.map(|said| {
        let rtr = choose_rtr(&said, ird);
        Enhanced {
            ird,
            ord,
            peer_to_peer: rtr.is_some(),
            send_rtr: rtr == Some(Rtr::Empty),
            write_rtr: rtr == Some(Rtr::Write),
            read_rtr: rtr == Some(Rtr::Read),
        }
    });
    let reply = StartFrame {
        kind: StartKind::Reply,
        markers: wishes.markers,
        crc,
        rejected: false,
        revision: request.revision,
        enhanced,
        private_data,
    };
    let agreed = NegotiatedParams {
        tx: Framing {
            markers: request.markers,
            crc,
        },
        rx: Framing {
            markers: wishes.markers,
            crc,
        },
        ird,
        ord,
        rtr: None,
        awaits_first: true,
    };
    Ok((reply, agreed))
}

/// Selects the first message from the types supported by the initiator.
fn choose_rtr(said: &Enhanced, ird: u16) -> Option<Rtr> {
    if !said.peer_to_peer {
        return None;
    }
    // A WRITE is the cheapest for both sides. A READ requires a resource.
    match said {
        Enhanced {
            write_rtr: true, ..
        } => Some(Rtr::Write),
        Enhanced { read_rtr: true, .. } if ird > 0 => Some(Rtr::Read),
        Enhanced { send_rtr: true, .. } => Some(Rtr::Empty),
        _ => None,
    }
}

/// Determines the negotiated parameters from our request and the reply. Also returns the reason if
/// the reply is not acceptable and the connection must be closed. The framing from both frames must
/// be used for the Terminate message.
#[must_use]
pub fn negotiate(
    request: &StartFrame,
    reply: &StartFrame,
) -> (NegotiatedParams, Option<Disagreement>) {
    let crc = request.crc || reply.crc;
    let mut agreed = NegotiatedParams {
        tx: Framing {
            markers: reply.markers,
            crc,
        },
        rx: Framing {
            markers: request.markers,
            crc,
        },
        ird: 0,
        ord: 0,
        rtr: None,
        awaits_first: false,
    };
    let disagreement = agree_on_resources(&mut agreed, request, reply).err();
    (agreed, disagreement)
}

/// Updates the parameters with the revision 2 fields in a reply.
fn agree_on_resources(
    agreed: &mut NegotiatedParams,
    request: &StartFrame,
    reply: &StartFrame,
) -> Result<(), Disagreement> {
    if !(1..=request.revision).contains(&reply.revision) {
        return Err(Disagreement::Revision {
            revision: reply.revision,
        });
    }
    let Some(requested) = request.enhanced else {
        return Ok(());
    };
    let Some(said) = reply.enhanced else {
        return Err(Disagreement::NoResources);
    };
    if said.ord != ANY_DEPTH && said.ord > requested.ird {
        return Err(Disagreement::Depth);
    }
    agreed.ird = requested.ird;
    agreed.ord = at_most(requested.ord, said.ird);
    agreed.rtr = match (requested.peer_to_peer && said.peer_to_peer, said) {
        (false, _) => None,
        (
            true,
            Enhanced {
                write_rtr: true, ..
            },
        ) if requested.write_rtr => Some(Rtr::Write),
        (true, Enhanced { read_rtr: true, .. }) if requested.read_rtr => Some(Rtr::Read),
        (true, Enhanced { send_rtr: true, .. }) if requested.send_rtr => Some(Rtr::Empty),
        _ => return Err(Disagreement::Rtr),
    };
    // This uses a resource like any other READ.
    if agreed.rtr == Some(Rtr::Read) {
        agreed.ord = agreed.ord.max(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(ird: u16, ord: u16) -> Wishes {
        Wishes {
            markers: false,
            crc: true,
            revision: 2,
            ird,
            ord,
        }
    }

    #[test]
    fn peers_use_smaller_limits() {
        let requested = request(&wishes(3, 5), b"hello".to_vec());
        let (said, passive) = reply(&requested, &wishes(4, 9), b"welcome".to_vec()).unwrap();
        let (active, None) = negotiate(&requested, &said) else {
            panic!("the reply fits");
        };
        assert_eq!((active.ird, active.ord), (3, 4));
        assert_eq!((passive.ird, passive.ord), (4, 3));
        assert_eq!(active.rtr, Some(Rtr::Write));
        assert!(passive.awaits_first && active.tx == passive.rx);
        // If one side leaves the choice to the peer, the peer's value is used.
        let requested = request(&wishes(ANY_DEPTH, ANY_DEPTH), Vec::new());
        let (_, passive) = reply(&requested, &wishes(4, 9), Vec::new()).unwrap();
        assert_eq!((passive.ird, passive.ord), (4, 9));
    }

    #[test]
    fn markers_follow_receiver_request() {
        let with = Wishes {
            markers: true,
            crc: false,
            ..wishes(1, 1)
        };
        let requested = request(&with, Vec::new());
        let (said, passive) = reply(&requested, &wishes(1, 1), Vec::new()).unwrap();
        let (active, None) = negotiate(&requested, &said) else {
            panic!("the reply fits");
        };
        assert!(active.rx.markers && passive.tx.markers);
        assert!(!active.tx.markers && !passive.rx.markers);
        // CRCs are used if requested by either side.
        assert!(active.tx.crc && active.rx.crc && passive.tx.crc && passive.rx.crc);
    }

    #[test]
    fn revision_1_has_no_resources() {
        let old = Wishes {
            revision: 1,
            ..wishes(7, 8)
        };
        let requested = request(&old, Vec::new());
        let (said, passive) = reply(&requested, &wishes(4, 9), Vec::new()).unwrap();
        assert_eq!((said.revision, said.enhanced), (1, None));
        assert_eq!((passive.ird, passive.ord), (4, 9));
        let (active, None) = negotiate(&requested, &said) else {
            panic!("the reply fits");
        };
        assert_eq!((active.ird, active.ord, active.rtr), (0, 0, None));
    }

    #[test]
    fn invalid_replies_are_detected() {
        let requested = request(&wishes(3, 5), Vec::new());
        let (said, _) = reply(&requested, &wishes(4, 9), Vec::new()).unwrap();
        let change = |change: fn(&mut StartFrame, &mut Enhanced)| {
            let (mut frame, mut enhanced) = (said.clone(), said.enhanced.unwrap());
            change(&mut frame, &mut enhanced);
            frame.enhanced = frame.enhanced.map(|_| enhanced);
            let (agreed, disagreement) = negotiate(&requested, &frame);
            assert!(agreed.tx.crc, "the message about it has a CRC");
            disagreement
        };
        assert_eq!(change(|_, e| e.ord = 4), Some(Disagreement::Depth));
        assert_eq!(change(|_, e| e.write_rtr = false), Some(Disagreement::Rtr));
        assert_eq!(
            change(|f, _| f.enhanced = None),
            Some(Disagreement::NoResources)
        );
        for revision in [0, 3] {
            let mut frame = said.clone();
            frame.revision = revision;
            let refused = Some(Disagreement::Revision { revision });
            assert_eq!(negotiate(&requested, &frame).1, refused);
            let mut frame = requested.clone();
            frame.revision = revision;
            let refused = Err(Disagreement::Revision { revision });
            assert_eq!(reply(&frame, &wishes(1, 1), Vec::new()).map(drop), refused);
        }
    }
}
