//! The key table, with a negotiation rule for each key.
//!
//! A single row per key is used for parsing, the response, the result and the default value. All
//! values are stored as numbers: a Boolean is 0 or 1, and a choice is the index in the list.

use super::frame::Digests;
use super::pdu::Stage;
use super::text;

/// Negotiation rule (RFC 7143 6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Each side declares its own number in this range.
    Declare(u32, u32),
    /// Each side declares its own limit, which is either at least this value or zero for no limit.
    DeclareLimit(u32),
    /// The minimum of two numbers in this range.
    Min(u32, u32),
    /// The maximum of two numbers in this range.
    Max(u32, u32),
    /// Yes if both sides send Yes.
    And,
    /// Yes if any side sends Yes.
    Or,
    /// Yes or No, declared by one side.
    DeclareBool,
    /// The first value in the list that is supported by the other side.
    List(&'static [&'static str]),
    /// A string sent by one side.
    Text,
    /// Used for authentication, which is implemented in a separate state machine.
    Security,
    /// A key that no longer exists. Always rejected.
    Obsolete,
}

/// The side which can send a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// Only sent by the initiator.
    Initiator,
    /// Only sent by the target.
    Target,
    /// Sent by either side.
    Both,
}

/// The phase in which a key can be sent (RFC 7143 13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// IO: during the login of any connection.
    Login,
    /// LO: during the login of the first connection in a session.
    LeadingLogin,
    /// FFPO: during the full-feature phase.
    FullFeature,
    /// ALL: at any time.
    Any,
}

/// The scope of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// All connections of the session.
    Session,
    /// Only the connection used to send it.
    Connection,
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The key.
    pub key: Key,
    /// Case-sensitive name on the wire.
    pub name: &'static str,
    /// Negotiation rule.
    pub rule: Rule,
    /// Default value if the key is not negotiated.
    pub default: u32,
    /// Scope of the value.
    pub scope: Scope,
    /// The side which can send this key.
    pub sender: Sender,
    /// The phase in which this key can be sent.
    pub usage: Use,
    /// Set when the key is used in a discovery session.
    pub in_discovery: bool,
    /// The section that defines this key.
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

        /// All keys in RFC 7143, RFC 7144 and RFC 7145, in the same order as [`Key`].
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
    /// Number of keys in the table.
    pub const COUNT: usize = COUNT;

    /// Returns the key with the given name, which is case-sensitive.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.key)
    }

    /// Returns whether this is only used for iSER connections (RFC 7145 6.4, 6.5, 6.7 to 6.10).
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

    /// Returns the table row for this key.
    #[must_use]
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

/// Parses a number, either in decimal or in hex with a `0x` prefix (RFC 7143 6.1).
#[must_use]
pub fn parse_number(value: &str) -> Option<u32> {
    let (digits, radix) = match value
        .strip_prefix("0x")
        .or_else(|| value.strip_prefix("0X"))
    {
        Some(digits) => (digits, 16),
        None => (value, 10),
    };
    // The conversion below would accept a sign, which is not valid here.
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

/// A value for each key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Values([u32; COUNT]);

impl Default for Values {
    /// Returns the default values in the table.
    fn default() -> Self {
        Self(std::array::from_fn(|at| TABLE[at].default))
    }
}

impl Values {
    /// Returns the value of a key.
    #[must_use]
    pub fn of(&self, key: Key) -> u32 {
        self.0[key as usize]
    }

    /// Returns whether a Boolean key is set to Yes.
    #[must_use]
    pub fn is(&self, key: Key) -> bool {
        self.of(key) != 0
    }

    /// Sets the value of a key.
    pub fn set(&mut self, key: Key, value: u32) {
        self.0[key as usize] = value;
    }

    /// Sets the value of a key, used to create an offer.
    #[must_use]
    pub fn with(mut self, key: Key, value: u32) -> Self {
        self.set(key, value);
        self
    }
}

/// The values that a side can accept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Our values for numbers and Booleans.
    pub values: Values,
    /// Bit mask of accepted choices for each key with a list.
    lists: [u8; COUNT],
}

impl Default for Offer {
    /// Returns the default values in the table. For a list, only the first choice is accepted.
    fn default() -> Self {
        Self {
            values: Values::default(),
            lists: [1; COUNT],
        }
    }
}

impl Offer {
    /// Sets our value for a key.
    #[must_use]
    pub fn with(mut self, key: Key, value: u32) -> Self {
        self.values.set(key, value);
        self
    }

    /// Sets the accepted choices for a list, as a bit mask.
    #[must_use]
    pub fn with_list(mut self, key: Key, choices: u8) -> Self {
        self.lists[key as usize] = choices;
        self
    }

    /// Returns the value used by an initiator to offer this key.
    #[must_use]
    pub fn text(&self, key: Key) -> String {
        match key.row().rule {
            List(names) => {
                let bits = self.lists[key as usize];
                // Our lists are sorted with the best value last, but it must be sent first: the
                // peer will use the first value that it supports (RFC 7143 6.2.1).
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

/// Formats a value.
fn value_text(key: Key, value: u32) -> String {
    match key.row().rule {
        And | Or | DeclareBool => if value == 0 { "No" } else { "Yes" }.into(),
        List(names) => names[value as usize].into(),
        _ => value.to_string(),
    }
}

/// A negotiation error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// A key was sent twice.
    #[error("{0:?} was sent twice")]
    Twice(Key),
    /// A key was sent by the wrong side.
    #[error("{0:?} must not be sent by this side")]
    Sender(Key),
    /// A key was sent in the wrong phase or stage.
    #[error("{0:?} is not allowed in this stage")]
    Use(Key),
    /// The result does not match our offer.
    #[error("{0:?} has a result that does not match the offer")]
    Result(Key),
    /// The size of our response would exceed the limit.
    #[error("too many keys")]
    TooMany,
    /// The text is invalid.
    #[error(transparent)]
    Text(#[from] text::TextError),
}

/// Context in which a key was sent: the sender, stage and session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyContext {
    /// The side which has sent this key.
    pub from: Sender,
    /// Current login stage.
    pub stage: Stage,
    /// Set for the first connection in a session.
    pub leading: bool,
    /// Set for a discovery session.
    pub discovery: bool,
}

impl KeyContext {
    /// Returns whether this was sent by an initiator during login.
    fn is_initiator_login(self) -> bool {
        self.is_login() && self.from == Sender::Initiator
    }

    fn is_login(self) -> bool {
        self.stage != Stage::FullFeature
    }
}

/// Maximum size of the response that we create for a single request, in bytes.
pub const MAX_RESPONSE: usize = 8192;

/// Negotiation of the keys for a connection.
#[derive(Clone, Debug)]
pub struct Negotiation {
    offer: Offer,
    agreed: Values,
    /// Values declared by the peer, for keys that can be declared by both sides.
    peer: Values,
    /// Keys sent by the peer.
    seen: u64,
    /// Keys sent by us.
    sent: u64,
}

const _: () = assert!(COUNT <= 64);

impl Negotiation {
    /// Creates a new negotiation. No keys have been sent yet.
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

    /// Returns the current negotiated values. Other keys are set to their default values.
    #[must_use]
    pub fn agreed(&self) -> &Values {
        &self.agreed
    }

    /// Returns the values declared by the peer.
    #[must_use]
    pub fn peer(&self) -> &Values {
        &self.peer
    }

    /// Returns the values that we can accept.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns whether we offer iSER, which is the case for an iSER connection.
    #[must_use]
    pub fn is_rdma(&self) -> bool {
        self.offer.values.is(Key::RdmaExtensions)
    }

    /// Returns whether the peer has sent this key.
    #[must_use]
    pub fn has_seen(&self, key: Key) -> bool {
        self.seen & 1 << key as u32 != 0
    }

    /// Adds a key to `out`, unless it has already been sent.
    pub fn send_key(&mut self, key: Key, out: &mut Vec<u8>) {
        let bit = 1 << key as u32;
        // A key can only be sent once during login (RFC 7143 6.3), but this is called for each
        // request.
        if self.sent & bit == 0 {
            self.sent |= bit;
            text::put_pair(out, key.row().name, &self.offer.text(key));
        }
    }

    /// Handles an offer or a declaration, and adds the response to `out` if necessary.
    ///
    /// For [`Rule::Text`] and [`Rule::Security`] this only checks the sender, phase and stage. The
    /// caller has to process these keys.
    ///
    /// # Errors
    /// [`KeyError`]: the negotiation has failed.
    pub fn handle_key(
        &mut self,
        name: &str,
        value: &str,
        context: KeyContext,
        out: &mut Vec<u8>,
    ) -> Result<Option<Key>, KeyError> {
        let Some(key) = Key::of(name) else {
            // The response contains the key, so the size depends on the peer. It's limited by the
            // length of a key and the check below.
            text::put_pair(out, name, "NotUnderstood");
            return bounded(None, out);
        };
        let row = key.row();
        match self.admit(row, context) {
            // Some initiators send a key in the wrong stage, or when joining a session, or a key
            // that can only be sent by targets. We ignore this and send a NotUnderstood response.
            Err(KeyError::Use(_) | KeyError::Sender(_)) if context.is_initiator_login() => {
                text::put_pair(out, row.name, "NotUnderstood");
                return bounded(None, out);
            }
            admitted => admitted?,
        }
        // The key is valid but not used here. If it's negotiated, we still need to send a response
        // (RFC 7143 6.2).
        let is_irrelevant =
            (context.discovery && !row.in_discovery) || (key.is_for_rdma() && !self.is_rdma());
        if is_irrelevant {
            text::put_pair(out, row.name, "Irrelevant");
            return bounded(Some(key), out);
        }
        let ours = self.offer.values.of(key);
        let result = match row.rule {
            Text | Security => return Ok(Some(key)),
            // These are for markers, which are never used: Reject.
            Obsolete => None,
            Declare(low, high) => {
                // No response for a declaration, unless it's invalid.
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
                // We have sent this key in the response, so we must not offer it again.
                self.agreed.set(key, result);
                self.sent |= 1 << key as u32;
                text::put_pair(out, row.name, &value_text(key, result));
            }
            // The value was invalid, so we use the default (RFC 7143 6.2). Continue with the login,
            // because the initiator has to decide whether it can use the default.
            None => text::put_pair(out, row.name, "Reject"),
        }
        bounded(Some(key), out)
    }

    /// Handles a pair sent by the target. This is either a response to our offer, a declaration, or
    /// an offer from the target for which a response is added to `out` (RFC 7143 6.2).
    ///
    /// # Errors
    /// [`KeyError`]: the negotiation has failed.
    pub fn conclude(
        &mut self,
        name: &str,
        value: &str,
        context: KeyContext,
        out: &mut Vec<u8>,
    ) -> Result<Option<Key>, KeyError> {
        // Linux also sends these for declarations if it doesn't support the key, even if this is a
        // key that can only be sent by us.
        if matches!(value, "Irrelevant" | "NotUnderstood" | "Reject") {
            return Ok(Key::of(name));
        }
        let Some(key) = Key::of(name) else {
            return self.handle_key(name, value, context, out);
        };
        let row = key.row();
        let is_negotiated = !matches!(row.rule, Text | Security | Declare(..) | DeclareBool);
        if is_negotiated && self.sent & 1 << key as u32 == 0 {
            return self.handle_key(name, value, context, out);
        }
        self.admit(row, context)?;
        let ours = self.offer.values.of(key);
        // It's a protocol error if the result doesn't match our offer (RFC 7143 6.2.2), because the
        // target would use a limit that we can't accept.
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
        // Use the order of the side that has sent the offer (RFC 7143 6.2.1), and skip any unknown
        // values.
        let bits = self.offer.lists[key as usize];
        value.split(',').find_map(|choice| {
            let place = names.iter().position(|name| *name == choice)?;
            (bits & 1 << place != 0).then_some(place as u32)
        })
    }

    fn admit(&mut self, row: &Row, context: KeyContext) -> Result<(), KeyError> {
        // Check the sender, phase and stage first. If any of these is wrong, the key must not be
        // added to `seen`.
        let is_login = context.is_login();
        if row.sender != Sender::Both && row.sender != context.from {
            return Err(KeyError::Sender(row.key));
        }
        let right_time = match row.usage {
            Use::Login => is_login,
            // SessionType can be sent again by a connection that joins the session. It's part of
            // the identity, which is checked against the session.
            Use::LeadingLogin => is_login && (context.leading || row.rule == Text),
            Use::FullFeature => !is_login,
            Use::Any => true,
        };
        let right_stage = match row.rule {
            Security => context.stage == Stage::Security,
            // Names etc. can be sent in the first PDU, in any stage.
            Text | Declare(..) | DeclareLimit(_) => true,
            _ => context.stage != Stage::Security,
        };
        if !right_time || !right_stage {
            return Err(KeyError::Use(row.key));
        }
        let bit = 1 << row.key as u32;
        // In the full-feature phase, each exchange is independent. Authentication keys can be sent
        // in more than one request.
        if self.seen & bit != 0 && is_login && row.rule != Security {
            return Err(KeyError::Twice(row.key));
        }
        self.seen |= bit;
        Ok(())
    }

    /// Returns the negotiated digests.
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
    // A request of 16 KiB with many short unknown keys could result in a much larger response.
    if out.len() > MAX_RESPONSE {
        return Err(KeyError::TooMany);
    }
    Ok(key)
}
