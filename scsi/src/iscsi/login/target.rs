//! The target's side.

use super::super::chap::{self, ALGORITHMS, Algorithm, CHALLENGE_LEN, Challenge, Credentials};
use super::super::keys::{Key, KeyContext, KeyError, Negotiation, Offer, Sender};
use super::super::name::{IscsiName, TargetAddress};
use super::super::pdu::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
use super::super::text::{self, Collector};
use super::super::{Cid, Isid, Itt, Tsih};
use super::{ConnectionParams, MAX_ROUNDS, SessionParams, connection_params, session_params};

/// Longest text of a response: what an initiator takes before it has declared anything.
const MAX_RESPONSE: usize = 8192;

/// The initiator that logs in, and the target that it names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// InitiatorName of the login.
    pub initiator: IscsiName,
    /// TargetName; none in a discovery session that names none.
    pub target: Option<IscsiName>,
    /// The session is one of discovery.
    pub discovery: bool,
    /// ISID of the session.
    pub isid: Isid,
    /// The session to join; zero for a new one.
    pub tsih: Tsih,
    /// CID of the connection.
    pub cid: Cid,
}

/// Authentication of an initiator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Auth {
    /// No authentication is required.
    None,
    /// CHAP is required (RFC 7143 12.1.3).
    Chap {
        /// Names and secrets that are accepted.
        accepted: Vec<Credentials>,
        /// With what we prove who we are, if asked.
        own: Option<Credentials>,
        /// Algorithms that are taken (CHAP_A); the initiator's order decides.
        algorithms: Vec<Algorithm>,
    },
}

/// On which terms an initiator may log in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    /// The values that the target agrees on.
    pub offer: Offer,
    /// The authentication that it needs.
    pub auth: Auth,
    /// Portal group tag of the portal.
    pub portal_group: u16,
}

/// Reason of a refused login.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The login fails with this status.
    Status(LoginStatus),
    /// It has to go elsewhere.
    Redirect {
        /// Address of the other portal.
        to: TargetAddress,
        /// The target has moved permanently.
        permanent: bool,
    },
}

/// A login that has succeeded, all but for its last response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompletedLogin {
    /// The initiator and its target.
    pub identity: Identity,
    /// The name under which it proved who it is.
    pub chap_name: Option<String>,
    /// Parameters of the session; of no meaning for a connection that joins one.
    pub session: SessionParams,
    /// Parameters of the connection.
    pub connection: ConnectionParams,
}

/// Decides about logins, for the target.
pub trait Gatekeeper {
    /// Decides, before authentication, on which terms an initiator may log in.
    ///
    /// # Errors
    /// The refusal.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Enters the session, or the connection into its session.
    ///
    /// # Errors
    /// The status that refuses it.
    fn join(&mut self, joined: &CompletedLogin) -> Result<Tsih, LoginStatus>;

    /// Fills with random bytes that cannot be predicted.
    fn random(&mut self, out: &mut [u8]);
}

/// The action after a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Wait for the next request.
    Continue,
    /// The full-feature phase begins.
    FullFeature(Box<CompletedLogin>),
    /// Close the connection after the response.
    Failed,
}

/// The answer to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Header of the response.
    pub response: LoginResponse,
    /// Text of its data segment.
    pub text: Vec<u8>,
    /// The action once it is sent.
    pub outcome: Outcome,
}

/// Progress of CHAP (RFC 7143 12.1.3).
#[derive(Clone, PartialEq, Eq, Debug)]
enum Chap {
    /// No key of CHAP was sent.
    Idle,
    /// AuthMethod=CHAP was agreed on.
    Chosen,
    /// A challenge was sent.
    Challenged(Challenge),
    /// The initiator has proved who it is.
    Proved(String),
}

/// The login of one connection.
#[derive(Debug)]
pub struct TargetLogin {
    stage: Stage,
    first: Option<(Isid, Tsih, Itt, Cid)>,
    identity: Option<Identity>,
    auth: Auth,
    chap: Chap,
    keys: Negotiation,
    collector: Collector,
    rounds: u32,
}

/// CHAP keys of one request.
#[derive(Default)]
struct ChapKeys<'a> {
    method: Option<&'a str>,
    algorithms: Option<&'a str>,
    id: Option<&'a str>,
    challenge: Option<&'a str>,
    name: Option<&'a str>,
    response: Option<&'a str>,
}

impl Default for TargetLogin {
    fn default() -> Self {
        Self::new()
    }
}

impl TargetLogin {
    /// Of a connection on which nothing has come yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            stage: Stage::Security,
            first: None,
            identity: None,
            auth: Auth::None,
            chap: Chap::Idle,
            keys: Negotiation::new(Offer::default()),
            collector: Collector::default(),
            rounds: 0,
        }
    }

    /// The initiator that logs in, once it is known.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// Takes a request and its text.
    pub fn handle(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        gate: &mut dyn Gatekeeper,
    ) -> Answer {
        let mut answer = Answer {
            response: LoginResponse {
                flags: LoginFlags {
                    current: request.flags.current,
                    transit: None,
                    continues: false,
                },
                version_max: 0,
                version_active: 0,
                isid: request.isid,
                tsih: request.tsih,
                itt: request.itt,
                status: LoginStatus::SUCCESS,
            },
            text: Vec::new(),
            outcome: Outcome::Continue,
        };
        // What the request has written so far is discarded by a refusal: of a failed login the
        // initiator gets the status, and of a redirection the address (RFC 7143 11.13.5).
        let refusal = match self.on_request(request, data, gate, &mut answer) {
            Ok(()) if answer.text.len() > MAX_RESPONSE => {
                Refusal::Status(LoginStatus::INITIATOR_ERROR)
            }
            Ok(()) => return answer,
            Err(refusal) => refusal,
        };
        answer.text.clear();
        answer.response.flags.transit = None;
        answer.outcome = Outcome::Failed;
        answer.response.status = match refusal {
            Refusal::Status(status) => status,
            Refusal::Redirect { to, permanent } => {
                text::put(&mut answer.text, "TargetAddress", &to.to_string());
                if permanent {
                    LoginStatus::MOVED_PERMANENTLY
                } else {
                    LoginStatus::MOVED_TEMPORARILY
                }
            }
        };
        answer
    }

    fn on_request(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        gate: &mut dyn Gatekeeper,
        answer: &mut Answer,
    ) -> Result<(), Refusal> {
        self.check_header(request)?;
        // While the C bit is set, the answer has no text (RFC 7143 6.2), and nothing is judged
        // before the text is whole.
        let collected = self.collector.take(data, request.flags.continues);
        let Some(text) = collected.map_err(|_| fault(LoginStatus::INITIATOR_ERROR))? else {
            return Ok(());
        };
        let pairs = text::pairs(&text).collect::<Result<Vec<_>, _>>();
        let pairs = pairs.map_err(|_| fault(LoginStatus::INITIATOR_ERROR))?;
        // Who it is comes before everything else, since that decides what is offered, and whether
        // CHAP is needed. Names must be in the first request (RFC 7143 6.3).
        if self.identity.is_none() {
            self.identify(request, &pairs, gate, &mut answer.text)?;
        }
        let chap = self.negotiate(&pairs, &mut answer.text)?;
        if self.stage == Stage::Security {
            self.authenticate(&chap, gate, &mut answer.text)?;
        } else {
            self.declare(&mut answer.text);
        }
        // At last, with what this request has brought: the stage may be left only when its own
        // work is done. Otherwise the initiator gets an answer without T, and goes on.
        match request.flags.transit {
            Some(next) if self.may_leave() => self.leave(next, gate, answer),
            _ => Ok(()),
        }
    }

    fn check_header(&mut self, request: &LoginRequest) -> Result<(), Refusal> {
        if request.version_min > 0 {
            return Err(fault(LoginStatus::UNSUPPORTED_VERSION));
        }
        self.rounds += 1;
        // A login is one task of one connection, so these stay the same throughout (RFC 7143 6.3,
        // 11.12.6).
        let this = (request.isid, request.tsih, request.itt, request.cid);
        let stage = request.flags.current;
        // The initiator chooses the stage that it begins with (RFC 7143 6.3.1). Later only `leave`
        // changes it.
        let first = *self.first.get_or_insert_with(|| {
            self.stage = stage;
            this
        });
        if first != this || stage != self.stage || self.rounds > MAX_ROUNDS {
            return Err(fault(LoginStatus::INITIATOR_ERROR));
        }
        Ok(())
    }

    /// Reads who it is from the first text.
    fn identify(
        &mut self,
        request: &LoginRequest,
        pairs: &[(&str, &str)],
        gate: &mut dyn Gatekeeper,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let value = |key: Key| {
            let found = pairs.iter().find(|(name, _)| *name == key.row().name);
            found.map(|(_, value)| *value)
        };
        let name =
            |value: &str| IscsiName::new(value).map_err(|_| fault(LoginStatus::INITIATOR_ERROR));
        let initiator = value(Key::InitiatorName);
        let initiator = name(initiator.ok_or(fault(LoginStatus::MISSING_PARAMETER))?)?;
        // Read here and not by the negotiation: the terms that it begins with depend on them.
        let discovery = match value(Key::SessionType) {
            None | Some("Normal") => false,
            Some("Discovery") => true,
            Some(_) => return Err(fault(LoginStatus::SESSION_TYPE)),
        };
        let target = match value(Key::TargetName) {
            // A name that no target can have is one that no target has.
            Some(target) => {
                Some(IscsiName::new(target).map_err(|_| fault(LoginStatus::NOT_FOUND))?)
            }
            None if discovery => None,
            None => return Err(fault(LoginStatus::MISSING_PARAMETER)),
        };
        let identity = Identity {
            initiator,
            target,
            discovery,
            isid: request.isid,
            tsih: request.tsih,
            cid: request.cid,
        };
        let identity = self.identity.insert(identity);
        let terms = gate.admit(identity)?;
        // The initiator has skipped SecurityNegotiation where the target insists on it (RFC 7143
        // 6.3.1).
        if self.stage == Stage::Operational && terms.auth != Auth::None {
            return Err(fault(LoginStatus::AUTHENTICATION_FAILURE));
        }
        let group = u32::from(terms.portal_group);
        self.keys = Negotiation::new(terms.offer.with(Key::TargetPortalGroupTag, group));
        // With the first response, and where the initiator has named a target (RFC 7143 13.9).
        if identity.target.is_some() {
            self.keys.say(Key::TargetPortalGroupTag, out);
        }
        self.auth = terms.auth;
        Ok(())
    }

    fn negotiate<'a>(
        &mut self,
        pairs: &[(&'a str, &'a str)],
        out: &mut Vec<u8>,
    ) -> Result<ChapKeys<'a>, Refusal> {
        let identity = self.identity.as_ref().expect("identified before");
        let context = KeyContext {
            from: Sender::Initiator,
            stage: self.stage,
            // A connection that joins a session finds its parameters fixed, so keys of the leading
            // login are refused there.
            leading: identity.tsih == Tsih(0),
            discovery: identity.discovery,
        };
        let mut chap = ChapKeys::default();
        for &(name, value) in pairs {
            // libiscsi repeats its names in the second stage if it had secrets and nothing was to
            // be proved.
            if self.rounds > 1 && repeats(identity, name, value) {
                continue;
            }
            let key = self.keys.answer(name, value, context, out);
            let slot = match key.map_err(key_fault)? {
                Some(Key::AuthMethod) => &mut chap.method,
                Some(Key::ChapA) => &mut chap.algorithms,
                Some(Key::ChapI) => &mut chap.id,
                Some(Key::ChapC) => &mut chap.challenge,
                Some(Key::ChapN) => &mut chap.name,
                Some(Key::ChapR) => &mut chap.response,
                _ => continue,
            };
            // The table lets authentication keys come again, since CHAP takes several rounds.
            // Within one request they must not.
            if slot.replace(value).is_some() {
                return Err(fault(LoginStatus::INITIATOR_ERROR));
            }
        }
        Ok(chap)
    }

    /// Says what we take ourselves.
    fn declare(&mut self, out: &mut Vec<u8>) {
        let discovery = self.identity.as_ref().is_some_and(|id| id.discovery);
        if discovery || !self.keys.is_rdma() {
            return self.keys.say(Key::MaxRecvDataSegmentLength, out);
        }
        // Linux fails a login in which it meets a key that it does not know: who has not used these
        // keys does not receive them.
        for key in [Key::MaxOutstandingUnexpectedPdus, Key::MaxAhsLength] {
            if self.keys.has_seen(key) {
                self.keys.say(key, out);
            }
        }
    }

    fn authenticate(
        &mut self,
        keys: &ChapKeys<'_>,
        gate: &mut dyn Gatekeeper,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let failure = || fault(LoginStatus::AUTHENTICATION_FAILURE);
        if let Some(methods) = keys.method {
            let wanted = match self.auth {
                Auth::None => "None",
                Auth::Chap { .. } => "CHAP",
            };
            // CHAP is begun once. A second AuthMethod would take back what was proved, and begin
            // again.
            if self.chap != Chap::Idle || !methods.split(',').any(|method| method == wanted) {
                return Err(failure());
            }
            text::put(out, "AuthMethod", wanted);
            if wanted == "CHAP" {
                self.chap = Chap::Chosen;
            }
        }
        // The order is fixed (RFC 7143 12.1.3): algorithms after the method, the response after the
        // challenge. A key at another place is a failure, and not an offer to begin again.
        match (&self.chap, keys.algorithms, keys.response) {
            (Chap::Chosen, Some(offered), None) => {
                let Auth::Chap { algorithms, .. } = &self.auth else {
                    return Err(failure());
                };
                // The first of the initiator's list that is taken here (RFC 7143 12.1.3).
                let mut offered = offered.split(',').filter_map(Algorithm::of);
                let first = offered.find(|algorithm| algorithms.contains(algorithm));
                let challenge = new_challenge(first.ok_or_else(failure)?, gate);
                text::put(out, "CHAP_A", &(challenge.algorithm as u8).to_string());
                text::put(out, "CHAP_I", &challenge.id.to_string());
                text::put(out, "CHAP_C", &chap::encode(&challenge.bytes));
                self.chap = Chap::Challenged(challenge);
                Ok(())
            }
            (Chap::Challenged(challenge), None, Some(response)) => {
                let name = self.check_response(challenge, keys, response, out)?;
                self.chap = Chap::Proved(name);
                Ok(())
            }
            (_, None, None) => Ok(()),
            _ => Err(failure()),
        }
    }

    /// Checks the proof, and gives ours if it is asked for; the initiator's CHAP name.
    fn check_response(
        &self,
        sent: &Challenge,
        keys: &ChapKeys<'_>,
        response: &str,
        out: &mut Vec<u8>,
    ) -> Result<String, Refusal> {
        let failure = || fault(LoginStatus::AUTHENTICATION_FAILURE);
        let Auth::Chap { accepted, own, .. } = &self.auth else {
            return Err(failure());
        };
        let name = keys.name.ok_or_else(failure)?;
        let known = accepted.iter().find(|known| known.name == name);
        // An unknown name takes as long as a wrong secret.
        let secret = known.map_or(&[][..], |known| &known.secret);
        if !sent.is_answered_by(response, secret) || known.is_none() {
            return Err(failure());
        }
        // The initiator asks for no proof of ours. An identifier without a challenge asks for
        // nothing that could be answered.
        let Some(challenge) = keys.challenge else {
            return if keys.id.is_none() {
                Ok(name.into())
            } else {
                Err(failure())
            };
        };
        // A proof that is not configured cannot be given. This status says that, too (RFC 7143
        // 11.13.5: target authentication is not supported).
        let own = own.as_ref().ok_or_else(failure)?;
        let id = keys.id.and_then(chap::parse_id).ok_or_else(failure)?;
        let challenge = chap::decode(challenge).ok_or_else(failure)?;
        // Our own challenge sent back would have us compute the answer that was asked for.
        if chap::is_equal(&challenge, &sent.bytes) {
            return Err(failure());
        }
        let proof = sent.algorithm.respond(id, &own.secret, &challenge);
        text::put(out, "CHAP_N", &own.name);
        text::put(out, "CHAP_R", &chap::encode(&proof));
        Ok(name.into())
    }

    /// Returns whether the stage has done what it is for.
    fn may_leave(&self) -> bool {
        match (self.stage, &self.auth, &self.chap) {
            (Stage::Security, Auth::Chap { .. }, chap) => matches!(chap, Chap::Proved(_)),
            _ => true,
        }
    }

    fn leave(
        &mut self,
        next: Stage,
        gate: &mut dyn Gatekeeper,
        answer: &mut Answer,
    ) -> Result<(), Refusal> {
        answer.response.flags.transit = Some(next);
        self.stage = next;
        if next != Stage::FullFeature {
            return Ok(());
        }
        let identity = self.identity.clone().expect("identified before");
        let joined = CompletedLogin {
            session: session_params(&self.keys, identity.discovery),
            connection: connection_params(&self.keys, Sender::Target, identity.discovery),
            chap_name: match &self.chap {
                Chap::Proved(name) => Some(name.clone()),
                _ => None,
            },
            identity,
        };
        // Joined at the very end. A login that fails before leaves no session, and ends none that
        // it would have replaced.
        answer.response.tsih = gate.join(&joined).map_err(fault)?;
        answer.outcome = Outcome::FullFeature(Box::new(joined));
        Ok(())
    }
}

fn new_challenge(algorithm: Algorithm, gate: &mut dyn Gatekeeper) -> Challenge {
    let mut random = [0; CHALLENGE_LEN + 1];
    gate.random(&mut random);
    // RFC 1994 wants another identifier with each challenge. A random one needs no counter that
    // the connections share.
    let [id, bytes @ ..] = random;
    debug_assert!(ALGORITHMS.contains(&algorithm));
    Challenge {
        algorithm,
        id,
        bytes,
    }
}

fn fault(status: LoginStatus) -> Refusal {
    Refusal::Status(status)
}

fn key_fault(_: KeyError) -> Refusal {
    fault(LoginStatus::INITIATOR_ERROR)
}

/// Returns whether an initiator repeats a declaration that it has made before.
fn repeats(identity: &Identity, name: &str, value: &str) -> bool {
    let is = |known: &IscsiName| IscsiName::new(value).is_ok_and(|name| name == *known);
    match Key::of(name) {
        Some(Key::InitiatorName) => is(&identity.initiator),
        Some(Key::TargetName) => identity.target.as_ref().is_some_and(is),
        Some(Key::SessionType) => (value == "Discovery") == identity.discovery,
        // Nothing depends on it.
        Some(Key::InitiatorAlias) => true,
        _ => false,
    }
}
