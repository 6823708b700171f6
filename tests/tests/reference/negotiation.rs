//! Compares the target's login with the rules in RFC 7143 section 13, which are defined as a table.

use std::collections::{BTreeMap, BTreeSet};

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{
    Auth, CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, TargetLogin, Terms,
};
use riser_scsi::iscsi::pdu::{FromInitiator, LoginStatus};
use riser_scsi::iscsi::{BHS_LEN, Tsih};

/// Result function of a key (RFC 7143 6.2), including its type and range.
enum Function {
    Minimum(u64, u64),
    Maximum(u64, u64),
    And,
    Or,
    /// First name in the list that is also supported by the other side.
    List(&'static [&'static str]),
    /// Value declared by one side without a response.
    Declared(u64, u64),
    /// IFMarker and OFMarker: Reject, or No (RFC 7143 13.25).
    Marker,
    /// IFMarkInt and OFMarkInt: Reject.
    MarkerInterval,
    /// A key that is not defined in any standard: NotUnderstood.
    Unknown,
}

use Function::{And, Declared, List, Marker, MarkerInterval, Maximum, Minimum, Or, Unknown};

struct Row {
    key: &'static str,
    function: Function,
    default: &'static str,
    /// LO: only valid in the login of the first connection of a session. Otherwise IO or ALL.
    is_leading_only: bool,
    /// Irrelevant when SessionType=Discovery.
    is_irrelevant: bool,
}

const fn row(key: &'static str, function: Function, default: &'static str) -> Row {
    Row {
        key,
        function,
        default,
        is_leading_only: false,
        is_irrelevant: false,
    }
}

impl Row {
    /// Use: LO.
    const fn leading(self) -> Self {
        Self {
            is_leading_only: true,
            ..self
        }
    }

    /// Irrelevant when SessionType=Discovery.
    const fn irrelevant(self) -> Self {
        Self {
            is_irrelevant: true,
            ..self
        }
    }
}

const LENGTH: Function = Minimum(512, (1 << 24) - 1);
const DIGESTS: Function = List(&["None", "CRC32C"]);

#[rustfmt::skip]
const ROWS: [Row; 21] = [
    row("HeaderDigest", DIGESTS, "None"),                                               // 13.1
    row("DataDigest", DIGESTS, "None"),                                                 // 13.1
    row("MaxConnections", Minimum(1, 65535), "1").leading().irrelevant(),               // 13.2
    row("InitialR2T", Or, "Yes").leading().irrelevant(),                                // 13.10
    row("ImmediateData", And, "Yes").leading().irrelevant(),                            // 13.11
    row("MaxRecvDataSegmentLength", Declared(512, (1 << 24) - 1), "8192"),              // 13.12
    row("MaxBurstLength", LENGTH, "262144").leading().irrelevant(),                     // 13.13
    row("FirstBurstLength", LENGTH, "65536").leading().irrelevant(),                    // 13.14
    row("DefaultTime2Wait", Maximum(0, 3600), "2").leading(),                           // 13.15
    row("DefaultTime2Retain", Minimum(0, 3600), "20").leading(),                        // 13.16
    row("MaxOutstandingR2T", Minimum(1, 65535), "1").leading().irrelevant(),            // 13.17
    row("DataPDUInOrder", Or, "Yes").leading().irrelevant(),                            // 13.18
    row("DataSequenceInOrder", Or, "Yes").leading().irrelevant(),                       // 13.19
    row("ErrorRecoveryLevel", Minimum(0, 2), "0").leading(),                            // 13.20
    row("TaskReporting", List(&["RFC3720", "ResponseFence", "FastAbort"]), "RFC3720")
        .leading().irrelevant(),                                                        // 13.23
    row("iSCSIProtocolLevel", Minimum(0, 31), "1").leading().irrelevant(),              // RFC 7144
    row("IFMarker", Marker, "No"),                                                      // 13.25
    row("OFMarker", Marker, "No"),                                                      // 13.25
    row("IFMarkInt", MarkerInterval, ""),                                               // 13.25
    row("OFMarkInt", MarkerInterval, ""),                                               // 13.25
    row("X-com.example.key", Unknown, ""),                                              // 6.2
];

/// Values sent by an initiator: valid values, the minimum and maximum of a range, values out of
/// range, and other invalid values.
const VALUES: [&str; 36] = [
    "Yes",
    "No",
    "yes",
    "Maybe",
    "",
    "None",
    "CRC32C",
    "CRC32C,None",
    "None,CRC32C",
    "X-other,CRC32C",
    "KRB5",
    "RFC3720",
    "FastAbort,ResponseFence,RFC3720",
    "ResponseFence",
    "0",
    "1",
    "2",
    "3",
    "19",
    "31",
    "32",
    "511",
    "512",
    "3600",
    "3601",
    "8192",
    "65535",
    "65536",
    "16777215",
    "16777216",
    "0x200",
    "0XFFFF",
    "0x",
    "-1",
    "+5",
    "99999999999999999999999999",
];

/// Parses a number using the grammar in RFC 7143 6.1, which doesn't allow a sign.
fn number(value: &str) -> Option<u64> {
    let hexadecimal = value.strip_prefix("0x").or(value.strip_prefix("0X"));
    let (digits, radix) = hexadecimal.map_or((value, 10), |digits| (digits, 16));
    let is_number = !digits.is_empty() && digits.chars().all(|c| c.is_digit(radix));
    is_number.then(|| u64::from_str_radix(digits, radix).unwrap_or(u64::MAX))
}

/// Target settings, as an index in the list of values for each key.
type Settings = [u8; ROWS.len()];

/// Returns the valid values of a key for the target's own side, and the value to use for `Offer`.
fn own(row: &Row, setting: u8) -> (String, u32) {
    let setting = u32::from(setting);
    match row.function {
        Minimum(low, high) | Maximum(low, high) | Declared(low, high) => {
            let values = [
                low,
                low + 1,
                20.clamp(low, high),
                8192.clamp(low, high),
                high,
            ];
            let value = values[setting as usize % values.len()];
            (value.to_string(), value as u32)
        }
        And | Or => match setting % 2 {
            0 => ("No".into(), 0),
            _ => ("Yes".into(), 1),
        },
        // Bit mask of the supported names.
        List(names) => {
            let bits = 1 + setting % ((1 << names.len()) - 1);
            let taken = names
                .iter()
                .enumerate()
                .filter(|(at, _)| bits & 1 << at != 0);
            let taken: Vec<_> = taken.map(|(_, name)| *name).collect();
            (taken.join(","), bits)
        }
        Marker | MarkerInterval | Unknown => (String::new(), 0),
    }
}

fn offer(settings: &Settings) -> Offer {
    ROWS.iter()
        .zip(settings)
        .fold(Offer::default(), |offer, (row, setting)| {
            let (_, value) = own(row, *setting);
            match (&row.function, Key::of(row.key)) {
                (Marker | MarkerInterval | Unknown, _) | (_, None) => offer,
                (List(_), Some(key)) => offer.with_list(key, value as u8),
                (_, Some(key)) => offer.with(key, value),
            }
        })
}

/// Returns the valid responses for a key, and the result of the negotiation.
fn expected_replies(row: &Row, ours: &str, theirs: &str) -> (Vec<String>, Option<String>) {
    let reject = (vec!["Reject".to_owned()], None);
    let agreed = |result: String| (vec![result.clone()], Some(result));
    let in_range = |low, high| number(theirs).filter(|n| (low..=high).contains(n));
    let ours_number = || number(ours).expect("a number of ours");
    match row.function {
        Minimum(low, high) => match in_range(low, high) {
            Some(n) => agreed(n.min(ours_number()).to_string()),
            None => reject,
        },
        Maximum(low, high) => match in_range(low, high) {
            Some(n) => agreed(n.max(ours_number()).to_string()),
            None => reject,
        },
        Declared(low, high) => match in_range(low, high) {
            Some(n) => (Vec::new(), Some(n.to_string())),
            None => reject,
        },
        And | Or => {
            let yes = match row.function {
                And => theirs == "Yes" && ours == "Yes",
                _ => theirs == "Yes" || ours == "Yes",
            };
            match theirs {
                "Yes" | "No" => agreed(if yes { "Yes" } else { "No" }.to_owned()),
                _ => reject,
            }
        }
        List(_) => {
            let taken: BTreeSet<_> = ours.split(',').collect();
            match theirs.split(',').find(|name| taken.contains(name)) {
                Some(name) => agreed(name.to_owned()),
                None => reject,
            }
        }
        Marker => (vec!["Reject".to_owned(), "No".to_owned()], None),
        MarkerInterval => reject,
        Unknown => (vec!["NotUnderstood".to_owned()], None),
    }
}

struct Gate {
    offer: Offer,
}

impl Gatekeeper for Gate {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        Ok(Terms {
            offer: self.offer,
            auth: Auth::None,
            portal_group: 7,
        })
    }

    fn join(&mut self, _: &CompletedLogin) -> Result<Tsih, LoginStatus> {
        Ok(Tsih(9))
    }

    fn random(&mut self, _: &mut [u8]) {
        unreachable!("there is no CHAP")
    }
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, bolero::TypeGenerator)]
enum Kind {
    /// The first connection of a session.
    Leading,
    /// A discovery connection, which must be the only connection of its session.
    Discovery,
    /// A connection that joins an existing session.
    Joining,
}

/// A login in operational negotiation.
#[derive(Clone, Debug, bolero::TypeGenerator)]
struct Login {
    kind: Kind,
    settings: Settings,
    /// Index of each key and value, in one or more requests.
    requests: Vec<Vec<(u8, u8)>>,
}

/// The response to each key must be as defined in RFC 7143, and the session must use the negotiated
/// values.
#[test]
fn login_matches_rules() {
    bolero::check!(name = "login_matches_rules")
        .with_type::<Login>()
        .for_each(log_in);
}

fn log_in(login: &Login) {
    let mut gate = Gate {
        offer: offer(&login.settings),
    };
    let mut machine = TargetLogin::new();
    let (discovery, joins) = (login.kind == Kind::Discovery, login.kind == Kind::Joining);
    let mut results = BTreeMap::<&str, String>::new();
    let mut seen = BTreeSet::new();
    let mut declares = BTreeSet::from(["TargetPortalGroupTag=7".to_owned()]);
    let own_of = |at: usize| own(&ROWS[at], login.settings[at]).0;
    declares.insert(format!("MaxRecvDataSegmentLength={}", own_of(5)));
    let requests: Vec<_> = login.requests.iter().take(3).collect();
    for number in 0..=requests.len() {
        // The last request has no keys and requests the full feature phase.
        let is_last = number == requests.len();
        let pairs = requests.get(number).map_or(&[][..], |pairs| &pairs[..]);
        let mut text = Vec::new();
        if number == 0 {
            text.extend_from_slice(b"InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0");
            if discovery {
                text.extend_from_slice(b"SessionType=Discovery\0");
            }
        }
        let mut expected = Vec::new();
        let mut fails = false;
        for (key, value) in pairs {
            let at = usize::from(*key) % ROWS.len();
            let row = &ROWS[at];
            let value = VALUES[usize::from(*value) % VALUES.len()];
            text.extend(format!("{}={value}\0", row.key).into_bytes());
            if matches!(row.function, Unknown) {
                expected.push((row.key, vec!["NotUnderstood".to_owned()]));
                continue;
            }
            // When a connection joins, it uses the parameters of the session, and initiators send
            // the keys of the first login again.
            if joins && row.is_leading_only {
                expected.push((row.key, vec!["NotUnderstood".to_owned()]));
                continue;
            }
            // Each key may only be sent once per login (RFC 7143 6.3).
            fails |= !seen.insert(row.key);
            let (mut right, result) = expected_replies(row, &own_of(at), value);
            if discovery && row.is_irrelevant {
                right = vec!["Irrelevant".to_owned()];
            } else if let Some(result) = result {
                results.insert(row.key, result);
            }
            if !right.is_empty() {
                expected.push((row.key, right));
            }
        }
        let reply = send_request(&mut machine, &text, is_last, joins, &mut gate);
        let shown = String::from_utf8_lossy(&text).replace('\0', " ");
        if fails {
            assert_eq!(reply.outcome, Outcome::Failed, "{shown}");
            assert_eq!(reply.response.status.class, 2, "{shown}");
            return;
        }
        check_text(&reply.text, expected, &mut declares, &shown);
        match reply.outcome {
            Outcome::Continue => assert!(!is_last, "{shown}"),
            Outcome::FullFeature(completed) if is_last => check(&completed, &results, login),
            other => panic!("{other:?} after {shown}"),
        }
    }
}

fn send_request(
    machine: &mut TargetLogin,
    text: &[u8],
    is_last: bool,
    joins: bool,
    gate: &mut Gate,
) -> riser_scsi::iscsi::login::LoginReply {
    let mut bhs = [0; BHS_LEN];
    // LoginOperationalNegotiation. If T is set, the next stage is the full feature phase.
    (bhs[0], bhs[1]) = (0x43, if is_last { 0x87 } else { 0x04 });
    bhs[15] = u8::from(joins);
    let frame = Frame {
        bhs: &bhs,
        ahs: &[],
        data: &[],
        is_intact: true,
    };
    match FromInitiator::parse(&frame) {
        Ok(FromInitiator::LoginRequest(request)) => machine.handle(&request, text, gate),
        other => panic!("{other:?}"),
    }
}

/// Checks that the response contains all expected pairs and no other pairs.
fn check_text(
    text: &[u8],
    mut expected: Vec<(&str, Vec<String>)>,
    declares: &mut BTreeSet<String>,
    shown: &str,
) {
    let text = std::str::from_utf8(text).expect("keys are UTF-8");
    for pair in text.split_terminator('\0') {
        let (key, value) = pair.split_once('=').expect("a pair");
        let is_reply =
            |(k, right): &(&str, Vec<String>)| *k == key && right.iter().any(|r| r == value);
        match expected.iter().position(is_reply) {
            Some(at) => drop(expected.remove(at)),
            // Each declaration must be sent once.
            None => assert!(declares.remove(pair), "{pair:?} to {shown}"),
        }
    }
    assert!(
        expected.is_empty(),
        "no {expected:?} in {text:?} to {shown}"
    );
}

/// Checks that the session uses the negotiated values, and the defaults for all other keys.
fn check(completed: &CompletedLogin, results: &BTreeMap<&str, String>, login: &Login) {
    let value = |key: &str| {
        let row = ROWS.iter().find(|row| row.key == key).expect("a row");
        results.get(key).map_or(row.default, String::as_str)
    };
    let n = |key: &str| number(value(key)).expect("a number");
    let is = |key: &str| value(key) == "Yes";
    let connection = &completed.connection;
    assert_eq!(
        u64::from(connection.max_send_segment),
        n("MaxRecvDataSegmentLength")
    );
    assert_eq!(connection.digests.header, value("HeaderDigest") == "CRC32C");
    assert_eq!(connection.digests.data, value("DataDigest") == "CRC32C");
    // When a connection joins, it uses the values of the session.
    if login.kind == Kind::Joining {
        return;
    }
    let session = &completed.session;
    assert_eq!(session.discovery, login.kind == Kind::Discovery);
    assert_eq!(u64::from(session.max_connections), n("MaxConnections"));
    assert_eq!(session.initial_r2t, is("InitialR2T"));
    assert_eq!(session.immediate_data, is("ImmediateData"));
    assert_eq!(u64::from(session.max_burst), n("MaxBurstLength"));
    let first = n("FirstBurstLength").min(n("MaxBurstLength"));
    assert_eq!(
        u64::from(session.first_burst),
        first,
        "13.14: never more than MaxBurstLength"
    );
    assert_eq!(
        u64::from(session.max_outstanding_r2t),
        n("MaxOutstandingR2T")
    );
    assert_eq!(u64::from(session.time2wait), n("DefaultTime2Wait"));
    assert_eq!(u64::from(session.time2retain), n("DefaultTime2Retain"));
    assert_eq!(
        u64::from(session.error_recovery_level),
        n("ErrorRecoveryLevel")
    );
    assert_eq!(session.data_pdu_in_order, is("DataPDUInOrder"));
    assert_eq!(session.data_sequence_in_order, is("DataSequenceInOrder"));
    assert_eq!(u64::from(session.protocol_level), n("iSCSIProtocolLevel"));
}
