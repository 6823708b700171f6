//! What two ends agree on by request and reply (RFC 5044 7.1, RFC 6581 9).
//!
//! We want CRCs, and offer that the responder may send first: our first message is then an RDMA WRITE
//! or READ of no bytes, as the responder chooses. A responder that has not been offered this sends
//! nothing before the initiator has.

use thiserror::Error;

use super::wire::fpdu::Framing;
use super::wire::start::{ANY_DEPTH, Enhanced, StartFrame, StartKind};
use super::wire::terminate::Reason;

/// Message by which the initiator lets the responder send (ready to receive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// An FPDU of no bytes.
    Empty,
    /// An RDMA WRITE of no bytes.
    Write,
    /// An RDMA READ of no bytes.
    Read,
}

/// What an end wants of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Markers in what it receives.
    pub markers: bool,
    /// CRCs in both directions. They are there as well if the peer wants them.
    pub crc: bool,
    /// Revision of MPA that it asks with: 1, or 2 with resources.
    pub revision: u8,
    /// RDMA READs and atomics of the peer that it holds at once.
    pub ird: u16,
    /// RDMA READs and atomics of its own that it wants at once.
    pub ord: u16,
}

/// What both ends have agreed on, from the point of view of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Framing of what is sent.
    pub tx: Framing,
    /// Framing of what is received.
    pub rx: Framing,
    /// RDMA READs and atomics of the peer that are held at once.
    pub ird: u16,
    /// RDMA READs and atomics of our own at once.
    pub ord: u16,
    /// Initiator: the message that is sent before all others.
    pub rtr: Option<Rtr>,
    /// Responder: nothing may be sent before the first message has come.
    pub awaits_first: bool,
}

/// Reason why there is no agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Disagreement {
    /// A revision that is not spoken here.
    #[error("MPA revision {revision}")]
    Revision {
        /// Revision of the peer's frame.
        revision: u8,
    },
    /// The reply has no resources, though the request has.
    #[error("a reply without resources")]
    NoResources,
    /// The responder wants more RDMA READs than the initiator holds.
    #[error("too many RDMA READs of the responder")]
    Depth,
    /// The responder has chosen no first message that was offered.
    #[error("no first message that was offered")]
    Rtr,
}

impl Disagreement {
    /// Reason that a Terminate message names for it.
    #[must_use]
    pub fn reason(self) -> Reason {
        match self {
            Self::Revision { .. } | Self::NoResources => Reason::InvalidStart,
            Self::Depth => Reason::InsufficientIrd,
            Self::Rtr => Reason::NoMatchingRtr,
        }
    }
}

/// The smaller of two numbers of RDMA READs, of which the peer's may leave the choice to us.
fn at_most(own: u16, peers: u16) -> u16 {
    match peers {
        ANY_DEPTH => own,
        _ => own.min(peers),
    }
}

/// The request of an end.
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

/// The reply that refuses a request.
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

/// The reply of an end that takes a request, and what is agreed by it.
///
/// # Errors
/// [`Disagreement::Revision`].
pub fn reply(
    request: &StartFrame,
    wishes: &Wishes,
    private_data: Vec<u8>,
) -> Result<(StartFrame, Agreed), Disagreement> {
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
    let agreed = Agreed {
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

/// The first message that a responder asks for, of those that it was offered.
fn choose_rtr(said: &Enhanced, ird: u16) -> Option<Rtr> {
    if !said.peer_to_peer {
        return None;
    }
    // A WRITE needs least of both ends. A READ needs a place for it.
    match said {
        Enhanced {
            write_rtr: true, ..
        } => Some(Rtr::Write),
        Enhanced { read_rtr: true, .. } if ird > 0 => Some(Rtr::Read),
        Enhanced { send_rtr: true, .. } => Some(Rtr::Empty),
        _ => None,
    }
}

/// What is agreed by a reply that takes our request, and why the connection is to be ended if the reply
/// does not fit. The message that says so is framed as the two frames ask for.
#[must_use]
pub fn judge(request: &StartFrame, reply: &StartFrame) -> (Agreed, Option<Disagreement>) {
    let crc = request.crc || reply.crc;
    let mut agreed = Agreed {
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

/// Adds what a reply says of revision 2 to what is agreed.
fn agree_on_resources(
    agreed: &mut Agreed,
    request: &StartFrame,
    reply: &StartFrame,
) -> Result<(), Disagreement> {
    if !(1..=request.revision).contains(&reply.revision) {
        return Err(Disagreement::Revision {
            revision: reply.revision,
        });
    }
    let Some(asked) = request.enhanced else {
        return Ok(());
    };
    let Some(said) = reply.enhanced else {
        return Err(Disagreement::NoResources);
    };
    if said.ord != ANY_DEPTH && said.ord > asked.ird {
        return Err(Disagreement::Depth);
    }
    agreed.ird = asked.ird;
    agreed.ord = at_most(asked.ord, said.ird);
    agreed.rtr = match (asked.peer_to_peer && said.peer_to_peer, said) {
        (false, _) => None,
        (
            true,
            Enhanced {
                write_rtr: true, ..
            },
        ) if asked.write_rtr => Some(Rtr::Write),
        (true, Enhanced { read_rtr: true, .. }) if asked.read_rtr => Some(Rtr::Read),
        (true, Enhanced { send_rtr: true, .. }) if asked.send_rtr => Some(Rtr::Empty),
        _ => return Err(Disagreement::Rtr),
    };
    // It takes a place as any other READ does.
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
    fn both_ends_agree_on_the_smaller_depths() {
        let asked = request(&wishes(3, 5), b"hello".to_vec());
        let (said, passive) = reply(&asked, &wishes(4, 9), b"welcome".to_vec()).unwrap();
        let (active, None) = judge(&asked, &said) else {
            panic!("the reply fits");
        };
        assert_eq!((active.ird, active.ord), (3, 4));
        assert_eq!((passive.ird, passive.ord), (4, 3));
        assert_eq!(active.rtr, Some(Rtr::Write));
        assert!(passive.awaits_first && active.tx == passive.rx);
        // Who leaves the choice to the other gets what that wants.
        let asked = request(&wishes(ANY_DEPTH, ANY_DEPTH), Vec::new());
        let (_, passive) = reply(&asked, &wishes(4, 9), Vec::new()).unwrap();
        assert_eq!((passive.ird, passive.ord), (4, 9));
    }

    #[test]
    fn each_direction_has_the_markers_that_its_receiver_wants() {
        let with = Wishes {
            markers: true,
            crc: false,
            ..wishes(1, 1)
        };
        let asked = request(&with, Vec::new());
        let (said, passive) = reply(&asked, &wishes(1, 1), Vec::new()).unwrap();
        let (active, None) = judge(&asked, &said) else {
            panic!("the reply fits");
        };
        assert!(active.rx.markers && passive.tx.markers);
        assert!(!active.tx.markers && !passive.rx.markers);
        // One end is enough for CRCs.
        assert!(active.tx.crc && active.rx.crc && passive.tx.crc && passive.rx.crc);
    }

    #[test]
    fn revision_1_names_no_depths() {
        let old = Wishes {
            revision: 1,
            ..wishes(7, 8)
        };
        let asked = request(&old, Vec::new());
        let (said, passive) = reply(&asked, &wishes(4, 9), Vec::new()).unwrap();
        assert_eq!((said.revision, said.enhanced), (1, None));
        assert_eq!((passive.ird, passive.ord), (4, 9));
        let (active, None) = judge(&asked, &said) else {
            panic!("the reply fits");
        };
        assert_eq!((active.ird, active.ord, active.rtr), (0, 0, None));
    }

    #[test]
    fn replies_that_do_not_fit_are_found_out() {
        let asked = request(&wishes(3, 5), Vec::new());
        let (said, _) = reply(&asked, &wishes(4, 9), Vec::new()).unwrap();
        let change = |change: fn(&mut StartFrame, &mut Enhanced)| {
            let (mut frame, mut enhanced) = (said.clone(), said.enhanced.unwrap());
            change(&mut frame, &mut enhanced);
            frame.enhanced = frame.enhanced.map(|_| enhanced);
            let (agreed, disagreement) = judge(&asked, &frame);
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
            assert_eq!(judge(&asked, &frame).1, refused);
            let mut frame = asked.clone();
            frame.revision = revision;
            let refused = Err(Disagreement::Revision { revision });
            assert_eq!(reply(&frame, &wishes(1, 1), Vec::new()).map(drop), refused);
        }
    }
}
