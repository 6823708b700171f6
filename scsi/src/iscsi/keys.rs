//! The table of keys: what each is, and how its value is agreed on.
//!
//! One row per key drives parsing, the answer, the result and the defaults. Values are numbers
//! here: a Boolean is 0 or 1, a choice of a list is its place in the list.

use super::frame::Digests;
use super::pdu::Stage;
use super::text;

/// Rule of negotiation (RFC 7143 6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Each side says a number of its own, in this range.
    Declare(u32, u32),
    /// Each side says a limit of its own, at least this, or zero for none.
    DeclareLimit(u32),
    /// The smaller of two numbers in this range.
    Min(u32, u32),
    /// The larger of two numbers in this range.
    Max(u32, u32),
    /// Yes if both say so.
    And,
    /// Yes if one says so.
    Or,
    /// One side says Yes or No.
    DeclareBool,
    /// The first of a list that the other side takes.
    List(&'static [&'static str]),
    /// One side says some text.
    Text,
    /// Not negotiated here: authentication, which has a machine of its own.
    Security,
    /// Was a key once; refused.
    Obsolete,
}

/// The side that may send a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// Only the initiator may send it.
    Initiator,
    /// Only the target may send it.
    Target,
    /// Either of the two.
    Both,
}

/// Phase in which a key may be sent (RFC 7143 13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// IO: in the login of every connection.
    Login,
    /// LO: in the login of a session's first connection.
    LeadingLogin,
    /// FFPO: in full-feature phase.
    FullFeature,
    /// ALL: at any time.
    Any,
}

/// Whom a value binds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// All connections of the session.
    Session,
    /// The connection on which it was sent.
    Connection,
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Key of this row.
    pub key: Key,
    /// Name on the wire, case-sensitive.
    pub name: &'static str,
    /// Rule of its negotiation.
    pub rule: Rule,
    /// The value of a key that is not negotiated.
    pub default: u32,
    /// Connections that its value binds.
    pub scope: Scope,
    /// The side that may send it.
    pub sender: Sender,
    /// Phase in which it may be sent.
    pub usage: Use,
    /// The key has a meaning in a discovery session.
    pub in_discovery: bool,
    /// The clause that defines it.
    pub clause: &'static str,
}

const DIGESTS: &[&str] = &["None", "CRC32C"];
const TASK_REPORTING: &[&str] = &["RFC3720", "ResponseFence", "FastAbort"];
const LENGTH_MAX: u32 = (1 << 24) - 1;

macro_rules! keys {
    ($($key:ident $name:literal, $rule:expr, $default:expr, $scope:ident, $sender:ident, $usage:ident, $discovery:literal, $clause:literal;)*) => {
        /// A key of RFC 7143 or RFC 7145.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub enum Key {
            $(#[doc = concat!("`", $name, "` (", $clause, ").")] $key),*
        }

        /// Every key of RFC 7143, RFC 7144 and RFC 7145, in the order of [`Key`].
        pub const TABLE: &[Row] = &[$(Row {
            key: Key::$key,
            name: $name,
            rule: $rule,
            default: $default,
            scope: Scope::$scope,
            sender: Sender::$sender,
            usage: Use::$usage,
            in_discovery: $discovery,
            clause: $clause,
        }),*];

        const COUNT: usize = [$(Key::$key),*].len();
    };
}

use Rule::{And, Declare, DeclareBool, DeclareLimit, List, Max, Min, Obsolete, Or, Security, Text};

keys! {
    AuthMethod "AuthMethod", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1";
    ChapA "CHAP_A", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1.3";
    ChapI "CHAP_I", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1.3";
    ChapC "CHAP_C", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1.3";
    ChapN "CHAP_N", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1.3";
    ChapR "CHAP_R", Security, 0, Connection, Both, Login, true, "RFC 7143 12.1.3";
    HeaderDigest "HeaderDigest", List(DIGESTS), 0, Connection, Both, Login, true, "RFC 7143 13.1";
    DataDigest "DataDigest", List(DIGESTS), 0, Connection, Both, Login, true, "RFC 7143 13.1";
    MaxConnections "MaxConnections", Min(1, 65535), 1, Session, Both, LeadingLogin, false, "RFC 7143 13.2";
    SendTargets "SendTargets", Text, 0, Session, Initiator, FullFeature, true, "RFC 7143 13.3";
    TargetName "TargetName", Text, 0, Session, Both, Login, true, "RFC 7143 13.4";
    InitiatorName "InitiatorName", Text, 0, Session, Initiator, Login, true, "RFC 7143 13.5";
    TargetAlias "TargetAlias", Text, 0, Session, Target, Any, true, "RFC 7143 13.6";
    InitiatorAlias "InitiatorAlias", Text, 0, Session, Initiator, Any, true, "RFC 7143 13.7";
    TargetAddress "TargetAddress", Text, 0, Session, Target, Any, true, "RFC 7143 13.8";
    TargetPortalGroupTag "TargetPortalGroupTag", Declare(0, 65535), 0, Session, Target, Login, true, "RFC 7143 13.9";
    InitialR2T "InitialR2T", Or, 1, Session, Both, LeadingLogin, false, "RFC 7143 13.10";
    ImmediateData "ImmediateData", And, 1, Session, Both, LeadingLogin, false, "RFC 7143 13.11";
    MaxRecvDataSegmentLength "MaxRecvDataSegmentLength", Declare(512, LENGTH_MAX), 8192, Connection, Both, Any, true, "RFC 7143 13.12";
    MaxBurstLength "MaxBurstLength", Min(512, LENGTH_MAX), 262_144, Session, Both, LeadingLogin, false, "RFC 7143 13.13";
    FirstBurstLength "FirstBurstLength", Min(512, LENGTH_MAX), 65_536, Session, Both, LeadingLogin, false, "RFC 7143 13.14";
    DefaultTime2Wait "DefaultTime2Wait", Max(0, 3600), 2, Session, Both, LeadingLogin, true, "RFC 7143 13.15";
    DefaultTime2Retain "DefaultTime2Retain", Min(0, 3600), 20, Session, Both, LeadingLogin, true, "RFC 7143 13.16";
    MaxOutstandingR2T "MaxOutstandingR2T", Min(1, 65535), 1, Session, Both, LeadingLogin, false, "RFC 7143 13.17";
    DataPduInOrder "DataPDUInOrder", Or, 1, Session, Both, LeadingLogin, false, "RFC 7143 13.18";
    DataSequenceInOrder "DataSequenceInOrder", Or, 1, Session, Both, LeadingLogin, false, "RFC 7143 13.19";
    ErrorRecoveryLevel "ErrorRecoveryLevel", Min(0, 2), 0, Session, Both, LeadingLogin, true, "RFC 7143 13.20";
    SessionType "SessionType", Text, 0, Session, Initiator, LeadingLogin, true, "RFC 7143 13.21";
    TaskReporting "TaskReporting", List(TASK_REPORTING), 0, Session, Both, LeadingLogin, false, "RFC 7143 13.23";
    NodeArchitecture "X#NodeArchitecture", Text, 0, Session, Both, LeadingLogin, true, "RFC 7143 13.26";
    IscsiProtocolLevel "iSCSIProtocolLevel", Min(0, 31), 1, Session, Both, LeadingLogin, false, "RFC 7144 7.1.1";
    IfMarker "IFMarker", And, 0, Connection, Both, Login, true, "RFC 3720 A.3.1";
    OfMarker "OFMarker", And, 0, Connection, Both, Login, true, "RFC 3720 A.3.1";
    IfMarkInt "IFMarkInt", Obsolete, 0, Connection, Both, Login, true, "RFC 3720 A.3.2";
    OfMarkInt "OFMarkInt", Obsolete, 0, Connection, Both, Login, true, "RFC 3720 A.3.2";
    RdmaExtensions "RDMAExtensions", And, 0, Session, Both, LeadingLogin, false, "RFC 7145 6.3";
    TargetRecvDataSegmentLength "TargetRecvDataSegmentLength", Min(512, LENGTH_MAX), 8192, Connection, Both, Login, false, "RFC 7145 6.4";
    InitiatorRecvDataSegmentLength "InitiatorRecvDataSegmentLength", Min(512, LENGTH_MAX), 8192, Connection, Both, Login, false, "RFC 7145 6.5";
    MaxOutstandingUnexpectedPdus "MaxOutstandingUnexpectedPDUs", DeclareLimit(2), 0, Session, Both, LeadingLogin, false, "RFC 7145 6.7";
    MaxAhsLength "MaxAHSLength", DeclareLimit(2), 256, Session, Both, LeadingLogin, false, "RFC 7145 6.8";
    TaggedBufferForSolicitedDataOnly "TaggedBufferForSolicitedDataOnly", DeclareBool, 0, Session, Initiator, LeadingLogin, false, "RFC 7145 6.9";
    IserHelloRequired "iSERHelloRequired", DeclareBool, 0, Session, Initiator, LeadingLogin, false, "RFC 7145 6.10";
}

impl Key {
    /// Number of keys, the rows of the table.
    pub const COUNT: usize = COUNT;

    /// The key with a name. Names are case-sensitive.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.key)
    }

    /// Whether it means something on connections of iSER only (RFC 7145 6.4, 6.5, 6.7 to 6.10).
    #[must_use]
    pub fn is_for_rdma(self) -> bool {
        matches!(
            self,
            Self::TargetRecvDataSegmentLength
                | Self::InitiatorRecvDataSegmentLength
                | Self::MaxOutstandingUnexpectedPdus
                | Self::MaxAhsLength
                | Self::TaggedBufferForSolicitedDataOnly
                | Self::IserHelloRequired
        )
    }

    /// Row of the table.
    #[must_use]
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

/// Reads a number: decimal, or hexadecimal after `0x` (RFC 7143 6.1).
#[must_use]
pub fn parse_number(value: &str) -> Option<u32> {
    let (digits, radix) = match value
        .strip_prefix("0x")
        .or_else(|| value.strip_prefix("0X"))
    {
        Some(digits) => (digits, 16),
        None => (value, 10),
    };
    // A sign would be taken by the conversion, and is none of the grammar.
    let first = digits.chars().next()?;
    if !first.is_digit(radix) {
        return None;
    }
    u32::from_str_radix(digits, radix).ok()
}

fn parse_bool(value: &str) -> Option<u32> {
    match value {
        "Yes" => Some(1),
        "No" => Some(0),
        _ => None,
    }
}

/// Values of keys, by key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Values([u32; COUNT]);

impl Default for Values {
    /// The defaults of the table.
    fn default() -> Self {
        Self(std::array::from_fn(|at| TABLE[at].default))
    }
}

impl Values {
    /// The value of a key.
    #[must_use]
    pub fn of(&self, key: Key) -> u32 {
        self.0[key as usize]
    }

    /// Returns whether a Boolean key is Yes.
    #[must_use]
    pub fn is(&self, key: Key) -> bool {
        self.of(key) != 0
    }

    /// Sets the value of a key.
    pub fn set(&mut self, key: Key, value: u32) {
        self.0[key as usize] = value;
    }

    /// Sets a value, for building offers.
    #[must_use]
    pub fn with(mut self, key: Key, value: u32) -> Self {
        self.set(key, value);
        self
    }
}

/// The values that a side is willing to agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Own values of numbers and Booleans.
    pub values: Values,
    /// Per list key, a bit for each choice that is acceptable.
    lists: [u8; COUNT],
}

impl Default for Offer {
    /// The defaults of the table, and the first choice of every list only.
    fn default() -> Self {
        Self {
            values: Values::default(),
            lists: [1; COUNT],
        }
    }
}

impl Offer {
    /// With a value of our own.
    #[must_use]
    pub fn with(mut self, key: Key, value: u32) -> Self {
        self.values.set(key, value);
        self
    }

    /// With these choices of a list, a bit for each place.
    #[must_use]
    pub fn with_list(mut self, key: Key, choices: u8) -> Self {
        self.lists[key as usize] = choices;
        self
    }

    /// The text with which an initiator offers a key.
    #[must_use]
    pub fn text(&self, key: Key) -> String {
        match key.row().rule {
            List(names) => {
                let bits = self.lists[key as usize];
                // The best comes last in our lists, and first in an offer: the other side takes
                // the first one that it supports (RFC 7143 6.2.1).
                let offered = names.iter().enumerate().rev();
                let offered: Vec<_> = offered
                    .filter(|(place, _)| bits & 1 << place != 0)
                    .map(|(_, name)| *name)
                    .collect();
                offered.join(",")
            }
            _ => value_text(key, self.values.of(key)),
        }
    }
}

/// A value as text.
fn value_text(key: Key, value: u32) -> String {
    match key.row().rule {
        And | Or | DeclareBool => if value == 0 { "No" } else { "Yes" }.into(),
        List(names) => names[value as usize].into(),
        _ => value.to_string(),
    }
}

/// A failure of the negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// A key came twice.
    #[error("{0:?} was sent twice")]
    Twice(Key),
    /// A key came from the wrong side.
    #[error("{0:?} is not for this side to send")]
    Sender(Key),
    /// A key came at the wrong time.
    #[error("{0:?} does not belong here")]
    Use(Key),
    /// An answer does not follow from what was offered.
    #[error("{0:?} has a result that was not offered")]
    Result(Key),
    /// The answers would be longer than a peer may make us write.
    #[error("too many keys")]
    TooMany,
    /// The text is malformed.
    #[error(transparent)]
    Text(#[from] text::TextError),
}

/// Context of a key: its sender, and the stage and session in which it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyContext {
    /// The side that sent it.
    pub from: Sender,
    /// Stage of the login.
    pub stage: Stage,
    /// The connection is the session's first.
    pub leading: bool,
    /// The session is one of discovery.
    pub discovery: bool,
}

/// Longest answer that a peer can make us write in one exchange, in bytes.
pub const MAX_ANSWER: usize = 8192;

/// The negotiation of a connection's keys.
#[derive(Clone, Debug)]
pub struct Negotiation {
    offer: Offer,
    agreed: Values,
    /// The peer's declarations, of keys that both sides declare.
    peer: Values,
    /// Keys that the peer sent.
    seen: u64,
    /// Keys that we sent.
    sent: u64,
}

const _: () = assert!(COUNT <= 64);

impl Negotiation {
    /// Negotiation in which no side has sent a key.
    #[must_use]
    pub fn new(offer: Offer) -> Self {
        Self {
            offer,
            agreed: Values::default(),
            peer: Values::default(),
            seen: 0,
            sent: 0,
        }
    }

    /// Values agreed on so far; the table's defaults for the others.
    #[must_use]
    pub fn agreed(&self) -> &Values {
        &self.agreed
    }

    /// Values that the peer has declared.
    #[must_use]
    pub fn peer(&self) -> &Values {
        &self.peer
    }

    /// Values that we offer.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Whether we are on a connection of iSER, and so offer it.
    #[must_use]
    pub fn is_rdma(&self) -> bool {
        self.offer.values.is(Key::RdmaExtensions)
    }

    /// Returns whether the peer has sent a key.
    #[must_use]
    pub fn has_seen(&self, key: Key) -> bool {
        self.seen & 1 << key as u32 != 0
    }

    /// Says a key of ours, unless it was said.
    pub fn say(&mut self, key: Key, out: &mut Vec<u8>) {
        let bit = 1 << key as u32;
        // A key may be said once in a login (RFC 7143 6.3); the stages ask for it in every round.
        if self.sent & bit == 0 {
            self.sent |= bit;
            text::put(out, key.row().name, &self.offer.text(key));
        }
    }

    /// Takes a pair that is an offer or a declaration, and writes the answer if it wants one.
    ///
    /// Keys of [`Rule::Text`] and [`Rule::Security`] are the caller's; they are checked for sender
    /// and place only.
    ///
    /// # Errors
    /// [`KeyError`]: the negotiation fails.
    pub fn answer(
        &mut self,
        name: &str,
        value: &str,
        context: KeyContext,
        out: &mut Vec<u8>,
    ) -> Result<Option<Key>, KeyError> {
        let Some(key) = Key::of(name) else {
            // An answer that repeats the key: it is bounded by the key's length, and their number
            // by the limit below.
            text::put(out, name, "NotUnderstood");
            return bounded(None, out);
        };
        let row = key.row();
        self.admit(row, context)?;
        // The key is known but means nothing here. One that is negotiated wants an answer all the
        // same (RFC 7143 6.2).
        let is_irrelevant =
            (context.discovery && !row.in_discovery) || (key.is_for_rdma() && !self.is_rdma());
        if is_irrelevant {
            text::put(out, row.name, "Irrelevant");
            return bounded(Some(key), out);
        }
        let ours = self.offer.values.of(key);
        let result = match row.rule {
            Text | Security => return Ok(Some(key)),
            // The intervals of markers, which are never agreed on: Reject.
            Obsolete => None,
            Declare(low, high) => {
                // A declaration has no answer, unless it is not legal.
                if let Some(n) = number_in(value, low, high) {
                    self.peer.set(key, n);
                    return Ok(Some(key));
                }
                None
            }
            DeclareLimit(low) => {
                if let Some(n) = limit_in(value, low) {
                    self.peer.set(key, n);
                    return Ok(Some(key));
                }
                None
            }
            DeclareBool => {
                if let Some(n) = parse_bool(value) {
                    self.peer.set(key, n);
                    return Ok(Some(key));
                }
                None
            }
            Min(low, high) => number_in(value, low, high).map(|n| n.min(ours)),
            Max(low, high) => number_in(value, low, high).map(|n| n.max(ours)),
            And => parse_bool(value).map(|n| n & ours),
            Or => parse_bool(value).map(|n| n | ours),
            List(names) => self.choose(key, names, value),
        };
        match result {
            Some(result) => {
                // An answer of ours is said: it must not be offered again later.
                self.agreed.set(key, result);
                self.sent |= 1 << key as u32;
                text::put(out, row.name, &value_text(key, result));
            }
            // The value was not legal, so the key keeps its default (RFC 7143 6.2). The login goes
            // on: whether it can live with that is for the initiator to decide.
            None => text::put(out, row.name, "Reject"),
        }
        bounded(Some(key), out)
    }

    /// Takes a pair that answers what we have offered, is a declaration of the peer, or is an offer
    /// of the peer, whose answer it writes: each offer has one (RFC 7143 6.2).
    ///
    /// # Errors
    /// [`KeyError`]: the negotiation fails.
    pub fn conclude(
        &mut self,
        name: &str,
        value: &str,
        context: KeyContext,
        out: &mut Vec<u8>,
    ) -> Result<Option<Key>, KeyError> {
        // Linux says so of declarations, too, which it does not know and only we may send.
        if matches!(value, "Irrelevant" | "NotUnderstood" | "Reject") {
            return Ok(Key::of(name));
        }
        let Some(key) = Key::of(name) else {
            return self.answer(name, value, context, out);
        };
        let row = key.row();
        let is_negotiated = !matches!(row.rule, Text | Security | Declare(..) | DeclareBool);
        if is_negotiated && self.sent & 1 << key as u32 == 0 {
            return self.answer(name, value, context, out);
        }
        self.admit(row, context)?;
        let ours = self.offer.values.of(key);
        // A result that does not follow from our offer is a protocol error (RFC 7143 6.2.2): the
        // target would go by a limit that we have not agreed to.
        let fault = KeyError::Result(key);
        let agreed = match row.rule {
            Text | Security | Obsolete => return Ok(Some(key)),
            Declare(low, high) => {
                self.peer
                    .set(key, number_in(value, low, high).ok_or(fault)?);
                return Ok(Some(key));
            }
            DeclareLimit(low) => {
                self.peer.set(key, limit_in(value, low).ok_or(fault)?);
                return Ok(Some(key));
            }
            DeclareBool => {
                self.peer.set(key, parse_bool(value).ok_or(fault)?);
                return Ok(Some(key));
            }
            Min(low, high) => number_in(value, low, high).filter(|n| *n <= ours),
            Max(low, high) => number_in(value, low, high).filter(|n| *n >= ours),
            And => parse_bool(value).filter(|n| *n <= ours),
            Or => parse_bool(value).filter(|n| *n >= ours),
            List(names) => self.choose(key, names, value),
        };
        self.agreed.set(key, agreed.ok_or(fault)?);
        Ok(Some(key))
    }

    fn choose(&self, key: Key, names: &[&str], value: &str) -> Option<u32> {
        // In the order of the side that offers (RFC 7143 6.2.1). Unknown names in its list are
        // passed over.
        let bits = self.offer.lists[key as usize];
        value.split(',').find_map(|choice| {
            let place = names.iter().position(|name| *name == choice)?;
            (bits & 1 << place != 0).then_some(place as u32)
        })
    }

    fn admit(&mut self, row: &Row, context: KeyContext) -> Result<(), KeyError> {
        // Sender, time and stage before anything is noted: a key at a wrong place must not count
        // as sent.
        let is_login = context.stage != Stage::FullFeature;
        if row.sender != Sender::Both && row.sender != context.from {
            return Err(KeyError::Sender(row.key));
        }
        let right_time = match row.usage {
            Use::Login => is_login,
            Use::LeadingLogin => is_login && context.leading,
            Use::FullFeature => !is_login,
            Use::Any => true,
        };
        let right_stage = match row.rule {
            Security => context.stage == Stage::Security,
            // Names and the like come with the first PDU, in any stage.
            Text | Declare(..) | DeclareLimit(_) => true,
            _ => context.stage != Stage::Security,
        };
        if !right_time || !right_stage {
            return Err(KeyError::Use(row.key));
        }
        let bit = 1 << row.key as u32;
        // In full-feature phase each exchange is new; authentication takes several rounds.
        if self.seen & bit != 0 && is_login && row.rule != Security {
            return Err(KeyError::Twice(row.key));
        }
        self.seen |= bit;
        Ok(())
    }

    /// The digests agreed on.
    #[must_use]
    pub fn digests(&self) -> Digests {
        Digests {
            header: self.agreed.is(Key::HeaderDigest),
            data: self.agreed.is(Key::DataDigest),
        }
    }
}

fn number_in(value: &str, low: u32, high: u32) -> Option<u32> {
    parse_number(value).filter(|n| (low..=high).contains(n))
}

fn limit_in(value: &str, low: u32) -> Option<u32> {
    parse_number(value).filter(|n| *n == 0 || *n >= low)
}

fn bounded(key: Option<Key>, out: &[u8]) -> Result<Option<Key>, KeyError> {
    // A text of 16 KiB of short unknown keys would have an answer several times as long.
    if out.len() > MAX_ANSWER {
        return Err(KeyError::TooMany);
    }
    Ok(key)
}
