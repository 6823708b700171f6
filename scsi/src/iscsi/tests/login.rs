//! Tests for the target's login, using scripts and the initiator's login.

use proptest::prelude::*;

use crate::iscsi::chap::{self, ALGORITHMS, Algorithm, Credentials};
use crate::iscsi::keys::{Key, KeyContext, KeyError, MAX_RESPONSE, Negotiation, Offer, Sender};
use crate::iscsi::login::{
    Auth, CompletedLogin, Gatekeeper, Identity, InitiatorConfig, InitiatorLogin, LoginError,
    LoginReply, LoginStep, Outcome, Refusal, TargetLogin, Terms,
};
use crate::iscsi::name::{IscsiName, TargetAddress};
use crate::iscsi::pdu::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
use crate::iscsi::text;
use crate::iscsi::{Cid, CmdSn, Isid, Itt, StatSn, Tsih};

struct Gate {
    auth: Auth,
    offer: Offer,
    refusal: Option<Refusal>,
    joined: Vec<CompletedLogin>,
    random: u8,
}

impl Gate {
    fn new(auth: Auth) -> Self {
        Self {
            auth,
            offer: Offer::default()
                .with(Key::MaxRecvDataSegmentLength, 65536)
                .with(Key::InitialR2T, 0)
                .with(Key::MaxOutstandingR2T, 4)
                .with_list(Key::HeaderDigest, 3)
                .with_list(Key::DataDigest, 3),
            refusal: None,
            joined: Vec::new(),
            random: 0,
        }
    }
}

impl Gatekeeper for Gate {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        match &self.refusal {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(Terms {
                offer: self.offer,
                auth: self.auth.clone(),
                portal_group: 1,
            }),
        }
    }

    fn join(&mut self, joined: &CompletedLogin) -> Result<Tsih, LoginStatus> {
        self.joined.push(joined.clone());
        Ok(Tsih(77))
    }

    fn random(&mut self, out: &mut [u8]) {
        for byte in out {
            self.random = self.random.wrapping_add(1);
            *byte = self.random;
        }
    }
}

fn chap_auth() -> Auth {
    Auth::Chap {
        accepted: vec![credentials("alice", "alice has a secret")],
        own: Some(credentials("target", "the target has one")),
        algorithms: ALGORITHMS.to_vec(),
    }
}

fn credentials(name: &str, secret: &str) -> Credentials {
    Credentials {
        name: name.into(),
        secret: secret.into(),
    }
}

fn request(current: Stage, transit: Option<Stage>) -> LoginRequest {
    LoginRequest {
        flags: LoginFlags {
            current,
            transit,
            continues: false,
        },
        version_max: 0,
        version_min: 0,
        isid: Isid([0x80, 1, 2, 3, 4, 5]),
        tsih: Tsih(0),
        itt: Itt(1),
        cid: Cid(1),
        cmd_sn: CmdSn(1),
        exp_stat_sn: StatSn(0),
    }
}

const NAMES: &str = "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0";

fn step(
    login: &mut TargetLogin,
    gate: &mut Gate,
    current: Stage,
    transit: Option<Stage>,
    text: &str,
) -> LoginReply {
    login.handle(&request(current, transit), text.as_bytes(), gate)
}

fn value<'a>(reply: &'a LoginReply, key: &str) -> Option<&'a str> {
    text::pairs(&reply.text)
        .map(Result::unwrap)
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

use Stage::{FullFeature, Operational, Security};

#[test]
fn login_without_authentication_takes_one_request() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let text = format!(
        "{NAMES}SessionType=Normal\0HeaderDigest=CRC32C,None\0DataDigest=None\0InitialR2T=No\0\
         ImmediateData=Yes\0MaxBurstLength=16384\0FirstBurstLength=65536\0MaxOutstandingR2T=8\0\
         MaxRecvDataSegmentLength=0x20000\0ErrorRecoveryLevel=2\0MaxConnections=4\0\
         OFMarker=No\0X-com.example.key=1\0"
    );
    let reply = step(&mut login, &mut gate, Operational, Some(FullFeature), &text);
    assert_eq!(reply.response.status, LoginStatus::SUCCESS);
    assert_eq!(reply.response.flags.transit, Some(FullFeature));
    assert_eq!(reply.response.tsih, Tsih(77));
    for (key, expected) in [
        ("TargetPortalGroupTag", "1"),
        ("HeaderDigest", "CRC32C"),
        ("DataDigest", "None"),
        ("InitialR2T", "No"),
        ("MaxBurstLength", "16384"),
        ("MaxOutstandingR2T", "4"),
        ("ErrorRecoveryLevel", "0"),
        ("MaxConnections", "1"),
        ("MaxRecvDataSegmentLength", "65536"),
        ("OFMarker", "No"),
        ("X-com.example.key", "NotUnderstood"),
    ] {
        assert_eq!(value(&reply, key), Some(expected), "{key}");
    }
    let Outcome::FullFeature(joined) = reply.outcome else {
        panic!("expected the full-feature phase");
    };
    assert_eq!(joined.session.first_burst, 16384, "limited to a burst");
    assert_eq!(joined.connection.max_send_segment, 0x20000);
    assert!(joined.connection.digests.header && !joined.connection.digests.data);
}

/// This is sent by libiscsi if it has a secret but the target doesn't require authentication.
#[test]
fn initiator_names_may_repeat_but_not_change() {
    let again = format!("{NAMES}InitiatorAlias=me\0SessionType=Normal\0");
    for (second, status) in [
        (again.clone(), LoginStatus::SUCCESS),
        (again.replace("a:i", "a:j"), LoginStatus::INITIATOR_ERROR),
        (again.replace("a:t", "a:u"), LoginStatus::INITIATOR_ERROR),
        (
            again.replace("Normal", "Discovery"),
            LoginStatus::INITIATOR_ERROR,
        ),
    ] {
        let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
        let first = format!("{again}AuthMethod=CHAP,None\0");
        let reply = step(&mut login, &mut gate, Security, Some(Operational), &first);
        assert_eq!(value(&reply, "AuthMethod"), Some("None"));
        let reply = step(
            &mut login,
            &mut gate,
            Operational,
            Some(FullFeature),
            &second,
        );
        assert_eq!(reply.response.status, status, "{second:?}");
    }
}

#[test]
fn refusals_use_rfc_status() {
    let cases: &[(&str, Stage, LoginStatus)] = &[
        (
            "TargetName=iqn.2026-01.a:t\0",
            Operational,
            LoginStatus::MISSING_PARAMETER,
        ),
        (
            "InitiatorName=iqn.2026-01.a:i\0",
            Operational,
            LoginStatus::MISSING_PARAMETER,
        ),
        (
            "InitiatorName=../../x\0",
            Operational,
            LoginStatus::INITIATOR_ERROR,
        ),
        (
            "InitiatorName=iqn.2026-01.a:i\0TargetName=x y\0",
            Operational,
            LoginStatus::NOT_FOUND,
        ),
        (
            "InitiatorName=iqn.2026-01.a:i\0SessionType=Other\0",
            Operational,
            LoginStatus::SESSION_TYPE,
        ),
        ("garbage", Operational, LoginStatus::INITIATOR_ERROR),
    ];
    for (text, stage, status) in cases {
        let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
        let reply = step(&mut login, &mut gate, *stage, None, text);
        assert_eq!(reply.response.status, *status, "{text}");
        assert_eq!(reply.outcome, Outcome::Failed);
    }
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(chap_auth()));
    let reply = step(&mut login, &mut gate, Operational, Some(FullFeature), NAMES);
    assert_eq!(reply.response.status, LoginStatus::AUTHENTICATION_FAILURE);
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(chap_auth()));
    let none = format!("{NAMES}AuthMethod=None\0");
    let reply = step(&mut login, &mut gate, Security, Some(Operational), &none);
    assert_eq!(reply.response.status, LoginStatus::AUTHENTICATION_FAILURE);
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(chap_auth()));
    let reply = step(&mut login, &mut gate, Security, Some(FullFeature), NAMES);
    assert_eq!(reply.response.flags.transit, None, "not before CHAP");
    assert!(gate.joined.is_empty());
}

/// CVE-2026-90293: the full-feature phase can only be reached in the order of the state machine.
#[test]
fn cve_2026_90293_stages_cannot_be_skipped() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(chap_auth()));
    let first = format!("{NAMES}AuthMethod=CHAP\0");
    let reply = step(&mut login, &mut gate, Security, None, &first);
    assert_eq!(value(&reply, "AuthMethod"), Some("CHAP"));
    let reply = step(&mut login, &mut gate, Operational, Some(FullFeature), "");
    assert_eq!(reply.outcome, Outcome::Failed);
    assert!(gate.joined.is_empty());
}

/// CVE-2026-63887: a request with 8 KiB of keys resulted in a response of 32 KiB with
/// NotUnderstood.
#[test]
fn cve_2026_63887_unknown_keys_limit_response() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let many: String = (0..2000).map(|i| format!("k{i}=\0")).collect();
    let reply = step(
        &mut login,
        &mut gate,
        Operational,
        None,
        &format!("{NAMES}{many}"),
    );
    assert_eq!(reply.response.status, LoginStatus::INITIATOR_ERROR);
    assert!(reply.text.is_empty());
    // It should also not be that long before it's discarded. The limit is only exceeded by the last
    // key.
    let mut keys = Negotiation::new(Offer::default());
    let context = KeyContext {
        from: Sender::Initiator,
        stage: Operational,
        leading: true,
        discovery: false,
    };
    let mut text = Vec::new();
    let mut names = (0..2000).map(|i| format!("k{i}"));
    let error = names.find_map(|name| keys.handle_key(&name, "", context, &mut text).err());
    assert_eq!(error, Some(KeyError::TooMany));
    assert!(text.len() < MAX_RESPONSE + 64, "{} bytes", text.len());
}

/// tgt and LIO continue here, and initiators which send such keys do so too.
#[test]
fn misplaced_key_is_not_understood() {
    for (stage, key, sent) in [
        (Operational, "AuthMethod", "None"),
        (Operational, "CHAP_A", "5"),
        (Operational, "TargetPortalGroupTag", "1"),
        (Operational, "SendTargets", "All"),
        (Security, "MaxBurstLength", "512"),
    ] {
        let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
        let text = format!("{NAMES}{key}={sent}\0");
        let reply = step(&mut login, &mut gate, stage, Some(FullFeature), &text);
        assert_eq!(reply.response.status, LoginStatus::SUCCESS, "{key}");
        let mut values = text::pairs(&reply.text).map(Result::unwrap);
        let is_refused = |pair| pair == (key, "NotUnderstood");
        assert!(values.any(is_refused), "{key}");
        let Outcome::FullFeature(joined) = reply.outcome else {
            panic!("{key}");
        };
        assert_eq!(joined.session.max_burst, 262_144);
    }
}

/// The second connection sends keys of the first connection again.
#[test]
fn joining_connection_may_repeat_leading_keys() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let mut request = request(Operational, Some(FullFeature));
    request.tsih = Tsih(77);
    let text = format!("{NAMES}SessionType=Normal\0MaxConnections=4\0InitialR2T=Yes\0");
    let reply = login.handle(&request, text.as_bytes(), &mut gate);
    assert_eq!(reply.response.status, LoginStatus::SUCCESS);
    assert_eq!(value(&reply, "SessionType"), None);
    assert_eq!(value(&reply, "MaxConnections"), Some("NotUnderstood"));
    assert_eq!(value(&reply, "InitialR2T"), Some("NotUnderstood"));
}

#[test]
fn refused_login_names_key_and_stage() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let text = format!("{NAMES}MaxBurstLength=512\0MaxBurstLength=1024\0");
    let reply = step(&mut login, &mut gate, Operational, None, &text);
    assert_eq!(reply.response.status, LoginStatus::INITIATOR_ERROR);
    let fault = login.fault().unwrap().to_string();
    assert_eq!(
        fault,
        "Operational stage: key MaxBurstLength was sent twice"
    );
}

#[test]
fn discovery_session_ignores_irrelevant_keys() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let text = "InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0MaxBurstLength=512\0MaxRecvDataSegmentLength=1\0";
    let reply = step(&mut login, &mut gate, Operational, None, text);
    assert_eq!(value(&reply, "MaxBurstLength"), Some("Irrelevant"));
    assert_eq!(value(&reply, "MaxRecvDataSegmentLength"), Some("Reject"));
}

#[test]
fn split_text_is_reassembled() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let text = format!("{NAMES}MaxBurstLength=16384\0");
    let (a, b) = text.split_at(40);
    let mut first = request(Operational, None);
    first.flags.continues = true;
    let reply = login.handle(&first, a.as_bytes(), &mut gate);
    assert_eq!((reply.text.len(), &reply.outcome), (0, &Outcome::Continue));
    let reply = step(&mut login, &mut gate, Operational, Some(FullFeature), b);
    assert_eq!(value(&reply, "MaxBurstLength"), Some("16384"));
    let mut endless = TargetLogin::new();
    let mut failed = 0;
    for _ in 0..10 {
        let reply = endless.handle(&first, &[b'A'; 8000], &mut gate);
        failed += u32::from(reply.outcome == Outcome::Failed);
    }
    assert!(failed > 0);
}

#[test]
fn login_fails_after_maximum_rounds() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    step(&mut login, &mut gate, Operational, None, NAMES);
    let ends = (0..100)
        .map(|_| step(&mut login, &mut gate, Operational, None, "").outcome)
        .position(|outcome| outcome == Outcome::Failed);
    assert_eq!(ends, Some(31));
}

#[test]
fn redirection_contains_target_address() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    gate.refusal = Some(Refusal::Redirect {
        to: TargetAddress::parse("10.0.0.9:3260,1").unwrap(),
        permanent: false,
    });
    let reply = step(&mut login, &mut gate, Operational, None, NAMES);
    assert_eq!(reply.response.status, LoginStatus::MOVED_TEMPORARILY);
    assert_eq!(value(&reply, "TargetAddress"), Some("10.0.0.9:3260,1"));
    let mut initiator = InitiatorLogin::new(config(), [1; 33]);
    initiator.poll_request().unwrap();
    let moved = initiator.handle_response(&reply.response, &reply.text);
    assert!(matches!(
        moved,
        Ok(LoginStep::Redirect {
            permanent: false,
            ..
        })
    ));
}

/// Runs a login until the target has sent a challenge.
fn challenged(gate: &mut Gate, algorithms: &str) -> (TargetLogin, Algorithm, u8, Vec<u8>) {
    let mut login = TargetLogin::new();
    step(
        &mut login,
        gate,
        Security,
        None,
        &format!("{NAMES}AuthMethod=CHAP,None\0"),
    );
    let reply = step(
        &mut login,
        gate,
        Security,
        None,
        &format!("CHAP_A={algorithms}\0"),
    );
    let algorithm = Algorithm::of(value(&reply, "CHAP_A").unwrap()).unwrap();
    let id = value(&reply, "CHAP_I").unwrap().parse().unwrap();
    let challenge = chap::decode(value(&reply, "CHAP_C").unwrap()).unwrap();
    (login, algorithm, id, challenge)
}

#[test]
fn chap_requires_correct_secret() {
    for (number, algorithm) in [
        ("5", Algorithm::Md5),
        ("6", Algorithm::Sha1),
        ("7", Algorithm::Sha256),
        ("8", Algorithm::Sha3_256),
    ] {
        for (name, secret, good) in [
            ("alice", "alice has a secret", true),
            ("alice", "", false),
            ("bob", "", false),
            ("bob", "alice has a secret", false),
        ] {
            let mut gate = Gate::new(chap_auth());
            let (mut login, chosen, id, challenge) = challenged(&mut gate, number);
            assert_eq!(chosen, algorithm);
            let proof = chap::encode(&algorithm.respond(id, secret.as_bytes(), &challenge));
            let text = format!("CHAP_N={name}\0CHAP_R={proof}\0");
            let reply = step(&mut login, &mut gate, Security, Some(Operational), &text);
            assert_eq!(
                reply.response.status == LoginStatus::SUCCESS,
                good,
                "{name}"
            );
        }
    }
    let mut gate = Gate::new(chap_auth());
    let mut login = TargetLogin::new();
    step(
        &mut login,
        &mut gate,
        Security,
        None,
        &format!("{NAMES}AuthMethod=CHAP\0"),
    );
    let reply = step(&mut login, &mut gate, Security, None, "CHAP_A=9\0");
    assert_eq!(reply.response.status, LoginStatus::AUTHENTICATION_FAILURE);
}

/// CVE-2018-14633, CVE-2026-63886: a response of any length should be either checked or refused,
/// for both encodings.
#[test]
fn cve_2018_14633_and_2026_63886_long_chap_response_fails() {
    for digits in [0, 1, 15, 31, 32, 33, 64, 66, 128, 2048, 2050, 4000] {
        for (prefix, digit) in [
            ("0x", "a"),
            ("0X", "F"),
            ("0b", "A"),
            ("0B", "/"),
            ("", "7"),
        ] {
            for key in ["CHAP_R", "CHAP_C"] {
                let mut gate = Gate::new(chap_auth());
                let (mut login, algorithm, id, challenge) = challenged(&mut gate, "5");
                let right = algorithm.respond(id, b"alice has a secret", &challenge);
                let long = format!("{prefix}{}", digit.repeat(digits));
                let text = match key {
                    "CHAP_R" => format!("CHAP_N=alice\0CHAP_R={long}\0"),
                    _ => format!(
                        "CHAP_N=alice\0CHAP_R={}\0CHAP_I=9\0CHAP_C={long}\0",
                        chap::encode(&right)
                    ),
                };
                let reply = step(&mut login, &mut gate, Security, Some(Operational), &text);
                // The challenge that we have to respond to can have any length up to the maximum.
                let is_legal = key == "CHAP_C" && reply.response.status == LoginStatus::SUCCESS;
                let bytes = chap::decode(&long);
                assert_eq!(is_legal, key == "CHAP_C" && bytes.is_some(), "{key}={long}");
                assert!(bytes.is_none_or(|b| b.len() <= chap::MAX_BINARY));
                assert!(reply.text.len() < 512);
            }
        }
    }
}

/// CVE-2024-45751: the same CHAP challenges were used after every restart.
#[test]
fn cve_2024_45751_chap_challenges_are_unique() {
    let mut gate = Gate::new(chap_auth());
    let one = challenged(&mut gate, "7");
    let other = challenged(&mut gate, "7");
    assert_ne!(one.3, other.3);
}

#[test]
fn reflected_challenge_is_refused() {
    let mut gate = Gate::new(chap_auth());
    let (mut login, algorithm, id, challenge) = challenged(&mut gate, "7");
    let proof = chap::encode(&algorithm.respond(id, b"alice has a secret", &challenge));
    let text = format!(
        "CHAP_N=alice\0CHAP_R={proof}\0CHAP_I=1\0CHAP_C={}\0",
        chap::encode(&challenge)
    );
    let reply = step(&mut login, &mut gate, Security, Some(Operational), &text);
    assert_eq!(reply.response.status, LoginStatus::AUTHENTICATION_FAILURE);
}

fn config() -> InitiatorConfig {
    InitiatorConfig {
        name: IscsiName::new("iqn.2026-01.a:i").unwrap(),
        target: Some(IscsiName::new("iqn.2026-01.a:t").unwrap()),
        isid: Isid([0x80, 1, 2, 3, 4, 5]),
        tsih: Tsih(0),
        cid: Cid(1),
        cmd_sn: CmdSn(1),
        credentials: None,
        target_credentials: None,
        offer: Offer::default()
            .with(Key::InitialR2T, 0)
            .with(Key::MaxRecvDataSegmentLength, 131_072)
            .with_list(Key::HeaderDigest, 3),
        keys: vec![
            Key::HeaderDigest,
            Key::DataDigest,
            Key::InitialR2T,
            Key::ImmediateData,
            Key::MaxBurstLength,
            Key::FirstBurstLength,
            Key::MaxOutstandingR2T,
        ],
    }
}

fn run(config: InitiatorConfig, gate: &mut Gate) -> Result<LoginStep, LoginError> {
    let mut initiator = InitiatorLogin::new(config, [200; 33]);
    let mut target = TargetLogin::new();
    loop {
        let (request, text) = initiator.poll_request().expect("next request");
        let reply = target.handle(&request, &text, gate);
        match initiator.handle_response(&reply.response, &reply.text)? {
            LoginStep::Send => {}
            end => return Ok(end),
        }
    }
}

#[test]
fn chap_initiator_logs_in_without_authentication() {
    let mut gate = Gate::new(Auth::None);
    let mut config = InitiatorConfig {
        credentials: Some(credentials("alice", "alice has a secret")),
        ..config()
    };
    let end = run(config.clone(), &mut gate);
    assert!(matches!(end, Ok(LoginStep::FullFeature { .. })), "{end:?}");
    // But this should fail if mutual authentication is required.
    config.target_credentials = Some(credentials("target", "the target has one"));
    let end = run(config, &mut gate);
    assert!(matches!(end, Err(LoginError::Refused(_))), "{end:?}");
}

#[test]
fn unoffered_digest_is_refused() {
    let mut gate = Gate::new(chap_auth());
    let config = InitiatorConfig {
        credentials: Some(credentials("alice", "alice has a secret")),
        ..config()
    };
    let login = InitiatorLogin::new(config, [1; 33]);
    let mut login = login.with_algorithms(vec![Algorithm::Md5]);
    let mut target = TargetLogin::new();
    let (request, text) = login.poll_request().unwrap();
    let reply = target.handle(&request, &text, &mut gate);
    let step = login.handle_response(&reply.response, &reply.text);
    assert_eq!(step, Ok(LoginStep::Send));
    let (request, text) = login.poll_request().unwrap();
    assert_eq!(text, b"CHAP_A=5\0");
    let reply = target.handle(&request, &text, &mut gate);
    assert_eq!(value(&reply, "CHAP_A"), Some("5"));
    let other = b"CHAP_A=7\0CHAP_I=1\0CHAP_C=0x0102\0";
    let end = login.handle_response(&reply.response, other);
    assert!(matches!(end, Err(LoginError::Protocol(_))), "{end:?}");
}

/// RFC 7143 11.13.6: a single response must not contain both a challenge and the transition to the
/// next stage. We would then have to send our response in a stage that doesn't allow it.
#[test]
fn unrequested_stage_transition_is_refused() {
    let to_operational = response(Security, Some(Operational));
    let not_requested = Err(LoginError::Protocol("stage transition was not requested"));
    let with_secret = || {
        let config = InitiatorConfig {
            credentials: Some(credentials("alice", "alice has a secret")),
            ..config()
        };
        let mut login = InitiatorLogin::new(config, [1; 33]);
        let (first, _) = login.poll_request().unwrap();
        assert_eq!(first.flags.transit, None);
        login
    };
    let mut login = with_secret();
    let step = login.handle_response(&response(Security, None), b"AuthMethod=CHAP\0");
    assert_eq!(step, Ok(LoginStep::Send));
    let (second, _) = login.poll_request().unwrap();
    assert_eq!(second.flags.transit, None);
    let challenge = b"CHAP_A=5\0CHAP_I=1\0CHAP_C=0x0102\0";
    assert_eq!(
        login.handle_response(&to_operational, challenge),
        not_requested
    );
    assert_eq!(login.poll_request(), None);
    let mut login = with_secret();
    let end = login.handle_response(&to_operational, b"AuthMethod=None\0");
    assert_eq!(end, not_requested);
}

#[test]
fn peers_negotiate_same_values() {
    let mut gate = Gate::new(Auth::None);
    let Ok(LoginStep::FullFeature {
        tsih,
        portal_group,
        session,
        connection,
    }) = run(config(), &mut gate)
    else {
        panic!("expected a successful login");
    };
    assert_eq!((tsih, portal_group), (Tsih(77), Some(1)));
    assert_eq!(session, gate.joined[0].session);
    assert_eq!(connection.digests, gate.joined[0].connection.digests);
    assert_eq!(connection.max_send_segment, 65536);
    assert_eq!(gate.joined[0].connection.max_send_segment, 131_072);
}

#[test]
fn mutual_chap_authenticates_both_sides() {
    let alice = || Some(credentials("alice", "alice has a secret"));
    let target = |secret: &str| Some(credentials("target", secret));
    let login = |credentials, target_credentials| {
        let config = InitiatorConfig {
            credentials,
            target_credentials,
            ..config()
        };
        run(config, &mut Gate::new(chap_auth()))
    };
    assert!(matches!(
        login(alice(), None),
        Ok(LoginStep::FullFeature { .. })
    ));
    assert!(matches!(
        login(alice(), target("the target has one")),
        Ok(LoginStep::FullFeature { .. })
    ));
    assert_eq!(
        login(alice(), target("another")),
        Err(LoginError::TargetNotProved)
    );
    assert_eq!(
        login(Some(credentials("alice", "wrong")), None),
        Err(LoginError::Refused(LoginStatus::AUTHENTICATION_FAILURE))
    );
}

proptest! {
    /// The target should return a response within its limits for any login, and never accept an
    /// initiator without authentication.
    #[test]
    fn unauthenticated_initiator_never_completes_login(
        script in proptest::collection::vec((0..2_u8, 0..4_u8, proptest::collection::vec(0..24_usize, 0..6)), 1..12),
    ) {
        let words = ["AuthMethod=CHAP", "AuthMethod=None", "AuthMethod=CHAP,None", "CHAP_A=5", "CHAP_A=7,8",
            "CHAP_N=alice", "CHAP_N=", "CHAP_R=0x00", "CHAP_R=0b", "CHAP_R=0xffffffffffffffffffffffffffffffff",
            "CHAP_I=1", "CHAP_C=0x01", "HeaderDigest=CRC32C", "MaxBurstLength=1", "MaxBurstLength=0x1000",
            "InitialR2T=Maybe", "ImmediateData=Yes", "Foo=Bar", "=", "x", "MaxConnections=65536",
            "SessionType=Discovery", "InitiatorName=iqn.2026-01.z", "TargetAddress=x"];
        let mut gate = Gate::new(chap_auth());
        let mut login = TargetLogin::new();
        let mut first = NAMES.to_owned();
        for (current, transit, picks) in script {
            let current = [Security, Operational][usize::from(current)];
            let transit = [None, Some(Operational), Some(FullFeature), None][usize::from(transit)].filter(|t| *t > current);
            let text: String = picks.iter().map(|p| format!("{}\0", words[*p])).collect();
            let text = std::mem::take(&mut first) + &text;
            let reply = step(&mut login, &mut gate, current, transit, &text);
            prop_assert!(reply.text.len() <= 8192);
            if reply.outcome == Outcome::Failed { break }
        }
        prop_assert!(gate.joined.is_empty());
    }
}

fn iser_offer() -> Offer {
    Offer::default()
        .with(Key::RdmaExtensions, 1)
        .with(Key::InitialR2T, 0)
}

/// The data segment lengths are negotiated per direction, so send and receive should be swapped
/// between both sides.
#[test]
fn rdma_login_swaps_segment_lengths() {
    let mut gate = Gate::new(Auth::None);
    gate.offer = iser_offer()
        .with(Key::TargetRecvDataSegmentLength, 16384)
        .with(Key::InitiatorRecvDataSegmentLength, 65536)
        .with(Key::MaxOutstandingUnexpectedPdus, 32);
    let mut target = TargetLogin::new();
    let config = InitiatorConfig {
        name: IscsiName::new("iqn.2026-01.a:i").unwrap(),
        target: Some(IscsiName::new("iqn.2026-01.a:t").unwrap()),
        isid: Isid([0x80, 1, 2, 3, 4, 5]),
        tsih: Tsih(0),
        cid: Cid(1),
        cmd_sn: CmdSn(1),
        credentials: None,
        target_credentials: None,
        offer: iser_offer()
            .with(Key::TargetRecvDataSegmentLength, 8192)
            .with(Key::InitiatorRecvDataSegmentLength, 4096)
            .with(Key::TaggedBufferForSolicitedDataOnly, 1)
            .with(Key::MaxOutstandingUnexpectedPdus, 7),
        keys: vec![
            Key::RdmaExtensions,
            Key::InitialR2T,
            Key::TargetRecvDataSegmentLength,
            Key::InitiatorRecvDataSegmentLength,
            Key::TaggedBufferForSolicitedDataOnly,
            Key::MaxOutstandingUnexpectedPdus,
        ],
    };
    let mut initiator = InitiatorLogin::new(config, [7; chap::CHALLENGE_LEN + 1]);
    let ours = loop {
        let (request, text) = initiator.poll_request().unwrap();
        let reply = target.handle(&request, &text, &mut gate);
        match initiator.handle_response(&reply.response, &reply.text) {
            Ok(LoginStep::Send) => {}
            Ok(LoginStep::FullFeature {
                session,
                connection,
                ..
            }) => break (session, connection),
            other => panic!("{other:?}"),
        }
    };
    let theirs = &gate.joined[0];
    assert!(ours.0.rdma_extensions && theirs.session.rdma_extensions);
    assert_eq!(theirs.session.tagged_solicited_only, Some(true));
    let segments =
        |of: &crate::iscsi::login::ConnectionParams| (of.max_send_segment, of.max_recv_segment);
    assert_eq!(segments(&ours.1), (8192, 4096));
    assert_eq!(segments(&theirs.connection), (4096, 8192));
    assert_eq!(ours.1.max_unexpected_pdus, 32);
    assert_eq!(theirs.connection.max_unexpected_pdus, 7);
}

/// Linux doesn't support two of the RFC 7145 keys and sends NotUnderstood.
#[test]
fn login_succeeds_despite_not_understood_keys() {
    let keys = [
        Key::TaggedBufferForSolicitedDataOnly,
        Key::MaxOutstandingUnexpectedPdus,
    ];
    let config = InitiatorConfig {
        offer: iser_offer().with(Key::TaggedBufferForSolicitedDataOnly, 1),
        keys: keys.to_vec(),
        ..config()
    };
    let (mut target, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let mut initiator = InitiatorLogin::new(config, [7; chap::CHALLENGE_LEN + 1]);
    let (request, _) = initiator.poll_request().unwrap();
    let reply = target.handle(&request, NAMES.as_bytes(), &mut gate);
    let text = keys.map(|key| format!("{}=NotUnderstood\0", key.row().name));
    let step = initiator.handle_response(&reply.response, text.concat().as_bytes());
    assert!(step.is_ok(), "{step:?}");
}

/// Creates a new response without a stage transition.
fn response(current: Stage, transit: Option<Stage>) -> LoginResponse {
    LoginResponse {
        flags: LoginFlags {
            current,
            transit,
            continues: false,
        },
        version_max: 0,
        version_active: 0,
        isid: config().isid,
        tsih: Tsih(77),
        itt: Itt(0),
        status: LoginStatus::SUCCESS,
    }
}

/// Creates a new login that has already sent its offer.
fn offering() -> InitiatorLogin {
    let config = InitiatorConfig {
        credentials: None,
        target_credentials: None,
        ..config()
    };
    let mut login = InitiatorLogin::new(config, [7; 33]);
    login.poll_request().unwrap();
    let to_operational = response(Security, Some(Operational));
    login
        .handle_response(&to_operational, b"AuthMethod=None\0")
        .unwrap();
    login.poll_request().unwrap();
    login
}

fn reply_to(login: &mut InitiatorLogin, text: &str) -> Result<String, LoginError> {
    login.handle_response(&response(Operational, None), text.as_bytes())?;
    let (_, reply) = login.poll_request().expect("next request");
    Ok(String::from_utf8(reply).unwrap())
}

/// RFC 7143 6.2: a response is required for each key that was offered by the other side.
#[test]
fn initiator_responds_to_target_offers() {
    for (proposal, expected) in [
        ("X-com.example.key=1\0", "X-com.example.key=NotUnderstood\0"),
        ("X-com.example.key=NotUnderstood\0", ""),
        // Keys that are not part of our offer.
        ("DefaultTime2Wait=7\0", "DefaultTime2Wait=7\0"),
        ("ErrorRecoveryLevel=2\0", "ErrorRecoveryLevel=0\0"),
        (
            "TaskReporting=FastAbort,RFC3720\0",
            "TaskReporting=RFC3720\0",
        ),
        ("OFMarker=Yes\0", "OFMarker=No\0"),
        ("OFMarkInt=2048~4096\0", "OFMarkInt=Reject\0"),
        ("DefaultTime2Wait=soon\0", "DefaultTime2Wait=Reject\0"),
        (
            "InitiatorRecvDataSegmentLength=512\0",
            "InitiatorRecvDataSegmentLength=Irrelevant\0",
        ),
        // There should be no response to a declaration or to the response for our offer.
        (
            "HeaderDigest=CRC32C\0MaxRecvDataSegmentLength=4096\0TargetAlias=a\0",
            "",
        ),
    ] {
        assert_eq!(
            reply_to(&mut offering(), proposal).as_deref(),
            Ok(expected),
            "{proposal}"
        );
    }
    let mut login = offering();
    reply_to(&mut login, "OFMarker=Yes\0").unwrap();
    let twice = reply_to(&mut login, "OFMarker=Yes\0");
    assert_eq!(twice, Err(LoginError::Key(KeyError::Twice(Key::OfMarker))));
}

#[test]
fn early_target_offers_get_operational_response() {
    let config = InitiatorConfig {
        credentials: None,
        target_credentials: None,
        ..config()
    };
    let mut login = InitiatorLogin::new(config, [7; 33]);
    login.poll_request().unwrap();
    let text = b"AuthMethod=None\0X-com.example.key=1\0";
    login
        .handle_response(&response(Security, Some(Operational)), text)
        .unwrap();
    let (_, text) = login.poll_request().unwrap();
    assert!(text.starts_with(b"X-com.example.key=NotUnderstood\0"));
}

/// The negotiation is complete after the last response from the target. It can only contain an
/// offer if the result doesn't depend on our response.
#[test]
fn last_response_must_not_need_reply() {
    let last = response(Operational, Some(FullFeature));
    let agreed: [&[u8]; 3] = [
        b"X-com.example.key=1\0",
        b"DefaultTime2Wait=7\0",
        b"InitiatorRecvDataSegmentLength=512\0",
    ];
    for text in agreed {
        let step = offering().handle_response(&last, text);
        assert!(
            matches!(step, Ok(LoginStep::FullFeature { .. })),
            "{step:?}"
        );
    }
    for text in [&b"ErrorRecoveryLevel=2\0"[..], b"OFMarkInt=2048~4096\0"] {
        let step = offering().handle_response(&last, text);
        assert!(matches!(step, Err(LoginError::Protocol(_))), "{step:?}");
    }
}

#[test]
fn unknown_target_keys_limit_response() {
    let text: String = (0..1600).map(|n| format!("k{n}=\0")).collect();
    assert!(text.len() < 16 << 10);
    let reply = reply_to(&mut offering(), &text);
    assert_eq!(reply, Err(LoginError::Key(KeyError::TooMany)));
}

#[test]
fn rdma_keys_are_irrelevant_on_tcp() {
    let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
    let text = format!(
        "{NAMES}RDMAExtensions=Yes\0InitiatorRecvDataSegmentLength=4096\0iSERHelloRequired=Yes\0\
         MaxAHSLength=512\0"
    );
    let reply = step(&mut login, &mut gate, Operational, Some(FullFeature), &text);
    assert_eq!(value(&reply, "RDMAExtensions"), Some("No"));
    for key in [
        "InitiatorRecvDataSegmentLength",
        "iSERHelloRequired",
        "MaxAHSLength",
    ] {
        assert_eq!(value(&reply, key), Some("Irrelevant"), "{key}");
    }
    assert_eq!(value(&reply, "MaxRecvDataSegmentLength"), Some("65536"));
    let Outcome::FullFeature(joined) = reply.outcome else {
        panic!("{reply:?}");
    };
    assert!(!joined.session.rdma_extensions);
    assert_eq!(joined.connection.max_recv_segment, 65536);
}

/// RFC 7145 6.7, 6.8: a limit is either zero if there is no limit, or at least 2.
#[test]
fn rdma_limits_must_not_be_one() {
    for name in ["MaxOutstandingUnexpectedPDUs", "MaxAHSLength"] {
        for (limit, is_refused) in [
            ("0", false),
            ("1", true),
            ("2", false),
            ("4294967295", false),
        ] {
            let (mut login, mut gate) = (TargetLogin::new(), Gate::new(Auth::None));
            gate.offer = iser_offer();
            let text = format!("{NAMES}RDMAExtensions=Yes\0{name}={limit}\0");
            let reply = step(&mut login, &mut gate, Operational, None, &text);
            let is_rejected = value(&reply, name) == Some("Reject");
            assert_eq!(is_rejected, is_refused, "{name}={limit}");
        }
    }
}

/// The configuration contains the allowed algorithms, and the initiator sends them in order of
/// preference.
#[test]
fn only_allowed_algorithms_are_selected() {
    let strong = vec![Algorithm::Sha3_256, Algorithm::Sha256];
    for (offered, chosen) in [("5,6,7,8", Some("7")), ("8,7", Some("8")), ("5,6", None)] {
        let Auth::Chap { accepted, own, .. } = chap_auth() else {
            unreachable!("it is CHAP");
        };
        let mut gate = Gate::new(Auth::Chap {
            accepted,
            own,
            algorithms: strong.clone(),
        });
        let mut login = TargetLogin::new();
        let hello = "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0AuthMethod=CHAP\0";
        let first = request(Stage::Security, None);
        let reply = login.handle(&first, hello.as_bytes(), &mut gate);
        assert_eq!(reply.response.status, LoginStatus::SUCCESS);
        let algorithms = format!("CHAP_A={offered}\0");
        let reply = login.handle(&first, algorithms.as_bytes(), &mut gate);
        match chosen {
            Some(chosen) => {
                let text = String::from_utf8(reply.text).unwrap();
                assert!(text.contains(&format!("CHAP_A={chosen}\0")), "{text}");
            }
            None => {
                let status = reply.response.status;
                assert_eq!(status, LoginStatus::AUTHENTICATION_FAILURE);
            }
        }
    }
}
