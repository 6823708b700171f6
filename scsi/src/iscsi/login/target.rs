//! Login state machine for a target.

use super::super::chap::{self, ALGORITHMS, Algorithm, CHALLENGE_LEN, Challenge, Credentials};
use super::super::keys::{Key, KeyContext, KeyError, Negotiation, Offer, Sender};
use super::super::name::{IscsiName, TargetAddress};
use super::super::pdu::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
use super::super::text::{self, Collector};
use super::super::{Cid, Isid, Itt, Tsih};
use super::{ConnectionParams, MAX_ROUNDS, SessionParams, connection_params, session_params};

/// Maximum size of the text in a response, in bytes. An initiator must support this before it has
/// declared a limit.
const MAX_RESPONSE: usize = 8192;

/// Identity of the initiator, and the target requested by it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// InitiatorName sent in the login.
    pub initiator: IscsiName,
    /// TargetName sent in the login. Optional for a discovery session.
    pub target: Option<IscsiName>,
    /// Set for a discovery session.
    pub discovery: bool,
    /// ISID of the session.
    pub isid: Isid,
    /// The session to join, or zero to create a new session.
    pub tsih: Tsih,
    /// CID of the connection.
    pub cid: Cid,
}

/// Authentication of the initiator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Auth {
    /// No authentication is required.
    None,
    /// CHAP is required (RFC 7143 12.1.3).
    Chap {
        /// Credentials that are accepted.
        accepted: Vec<Credentials>,
        /// Our own credentials, used when the initiator requests mutual authentication.
        own: Option<Credentials>,
        /// Algorithms that are accepted (CHAP_A). The initiator's order is used.
        algorithms: Vec<Algorithm>,
    },
}

/// Terms for the login of an initiator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    /// The values that can be accepted.
    pub offer: Offer,
    /// Required authentication.
    pub auth: Auth,
    /// Portal group tag for this portal.
    pub portal_group: u16,
}

/// The reason why a login is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Fail the login with this status.
    Status(LoginStatus),
    /// Redirect the initiator to another portal.
    Redirect {
        /// Address of the new portal.
        to: TargetAddress,
        /// Set when the target has moved permanently.
        permanent: bool,
    },
}

/// A successful login. Only the last response has not been sent yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompletedLogin {
    /// Identity of the initiator and target.
    pub identity: Identity,
    /// Credentials used to authenticate the initiator.
    pub credentials: Option<Credentials>,
    /// Session parameters. Not used for a connection that joins a session.
    pub session: SessionParams,
    /// Connection parameters.
    pub connection: ConnectionParams,
}

impl CompletedLogin {
    /// Returns the name used to authenticate the initiator.
    #[must_use]
    pub fn chap_name(&self) -> Option<&str> {
        self.credentials.as_ref().map(|proved| proved.name.as_str())
    }
}

/// Trait used by a target to validate logins.
pub trait Gatekeeper {
    /// Returns the terms for the login of this initiator. This is called before authentication.
    ///
    /// # Errors
    /// The reason why the login is refused.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Adds the session, or adds the connection to an existing session.
    ///
    /// # Errors
    /// The status to return in the response.
    fn join(&mut self, joined: &CompletedLogin) -> Result<Tsih, LoginStatus>;

    /// Fills a buffer with unpredictable random bytes.
    fn random(&mut self, out: &mut [u8]);
}

/// What to do after a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Wait for the next request.
    Continue,
    /// Start the full-feature phase.
    FullFeature(Box<CompletedLogin>),
    /// Close the connection after the response was sent.
    Failed,
}

/// The response to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoginReply {
    /// Header of the response.
    pub response: LoginResponse,
    /// Text in the data segment.
    pub text: Vec<u8>,
    /// What to do after this has been sent.
    pub outcome: Outcome,
}

/// State of CHAP (RFC 7143 12.1.3).
#[derive(Clone, PartialEq, Eq, Debug)]
enum Chap {
    /// No CHAP keys have been sent.
    Idle,
    /// AuthMethod=CHAP has been negotiated.
    Chosen,
    /// A challenge has been sent.
    Challenged(Challenge),
    /// The initiator has been authenticated.
    Proved(Credentials),
}

/// State of the login for a single connection.
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
    fault: Option<LoginFault>,
    /// CHAP_N sent by the initiator, whether or not the response was valid.
    claimed_name: Option<String>,
}

/// An error made by the initiator, used for logging.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoginFault {
    /// A key is not allowed here.
    #[error("{stage:?} stage: key {error}")]
    Key {
        /// Login stage of the request.
        stage: Stage,
        /// The error.
        error: KeyError,
    },
    /// The same authentication key was sent twice in a request.
    #[error("key {0:?} was sent twice in one request")]
    Repeated(Key),
    /// The text is invalid.
    #[error("malformed text: {0}")]
    Text(text::TextError),
    /// The initiator name is invalid.
    #[error("invalid InitiatorName")]
    InitiatorName,
    /// ISID, TSIH, Initiator Task Tag, CID or the stage is different from the previous request.
    #[error("ISID, TSIH, ITT, CID or CSG differ from the previous request")]
    Header,
    /// Exceeded the maximum number of requests.
    #[error("more than {MAX_ROUNDS} login requests")]
    Rounds,
    /// The response is larger than required to be supported by initiators.
    #[error("response of more than {MAX_RESPONSE} bytes")]
    Response,
}

/// CHAP keys in a request.
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
    /// Creates a new login for a new connection.
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
            fault: None,
            claimed_name: None,
        }
    }

    /// Returns the reason if the login has failed due to an error made by the initiator.
    #[must_use]
    pub fn fault(&self) -> Option<&LoginFault> {
        self.fault.as_ref()
    }

    /// Returns the CHAP name sent by the initiator, which may not have been authenticated.
    #[must_use]
    pub fn claimed_name(&self) -> Option<&str> {
        self.claimed_name.as_deref()
    }

    /// Stores the error and refuses the login.
    fn refuse(&mut self, fault: LoginFault) -> Refusal {
        self.fault = Some(fault);
        Refusal::Status(LoginStatus::INITIATOR_ERROR)
    }

    /// Returns the identity of the initiator, if this is known.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// Handles a request with its text.
    pub fn handle(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        gate: &mut dyn Gatekeeper,
    ) -> LoginReply {
        let mut reply = LoginReply {
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
        // If the login is refused, discard any response we've created so far. Only the status, or
        // the address for a redirection, should be sent (RFC 7143 11.13.5).
        let refusal = match self.on_request(request, data, gate, &mut reply) {
            Ok(()) if reply.text.len() > MAX_RESPONSE => self.refuse(LoginFault::Response),
            Ok(()) => return reply,
            Err(refusal) => refusal,
        };
        reply.text.clear();
        reply.response.flags.transit = None;
        reply.outcome = Outcome::Failed;
        reply.response.status = match refusal {
            Refusal::Status(status) => status,
            Refusal::Redirect { to, permanent } => {
                text::put_pair(&mut reply.text, "TargetAddress", &to.to_string());
                if permanent {
                    LoginStatus::MOVED_PERMANENTLY
                } else {
                    LoginStatus::MOVED_TEMPORARILY
                }
            }
        };
        reply
    }

    fn on_request(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        gate: &mut dyn Gatekeeper,
        reply: &mut LoginReply,
    ) -> Result<(), Refusal> {
        self.check_header(request)?;
        // As long as the C bit is set, we have to send an empty response (RFC 7143 6.2) and wait
        // for the rest of the text before we can check it.
        let collected = self.collector.add_part(data, request.flags.continues);
        let Some(text) = collected.map_err(|error| self.refuse(LoginFault::Text(error)))? else {
            return Ok(());
        };
        let pairs = text::pairs(&text).collect::<Result<Vec<_>, _>>();
        let pairs = pairs.map_err(|error| self.refuse(LoginFault::Text(error)))?;
        // Start with the identity, because the offer and the need for CHAP depend on it. The names
        // must be sent in the first request (RFC 7143 6.3).
        if self.identity.is_none() {
            self.identify(request, &pairs, gate, &mut reply.text)?;
        }
        let chap = self.negotiate(&pairs, &mut reply.text)?;
        if self.stage == Stage::Security {
            self.authenticate(&chap, gate, &mut reply.text)?;
        } else {
            self.declare(&mut reply.text);
        }
        // Do this last, after this request has been processed. We can only leave the stage if it is
        // complete. Otherwise, we send a response without T and the initiator has to continue.
        match request.flags.transit {
            Some(next) if self.may_leave() => self.leave_stage(next, gate, reply),
            _ => Ok(()),
        }
    }

    fn check_header(&mut self, request: &LoginRequest) -> Result<(), Refusal> {
        if request.version_min > 0 {
            return Err(fault(LoginStatus::UNSUPPORTED_VERSION));
        }
        self.rounds += 1;
        // The login is a single task on a single connection, so these values must not change (RFC
        // 7143 6.3, 11.12.6).
        let this = (request.isid, request.tsih, request.itt, request.cid);
        let stage = request.flags.current;
        // The initiator can select the initial stage (RFC 7143 6.3.1). After that, the stage is
        // only changed in `leave_stage`.
        let first = *self.first.get_or_insert_with(|| {
            self.stage = stage;
            this
        });
        if first != this || stage != self.stage {
            return Err(self.refuse(LoginFault::Header));
        }
        if self.rounds > MAX_ROUNDS {
            return Err(self.refuse(LoginFault::Rounds));
        }
        Ok(())
    }

    /// Gets the identity from the first text.
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
        let initiator = value(Key::InitiatorName);
        let initiator = initiator.ok_or(fault(LoginStatus::MISSING_PARAMETER))?;
        let initiator =
            IscsiName::new(initiator).map_err(|_| self.refuse(LoginFault::InitiatorName))?;
        // This is not part of the negotiation, because the initial offer depends on these values.
        let discovery = match value(Key::SessionType) {
            None | Some("Normal") => false,
            Some("Discovery") => true,
            Some(_) => return Err(fault(LoginStatus::SESSION_TYPE)),
        };
        let target = match value(Key::TargetName) {
            // If the name is invalid, there can't be such a target.
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
        // The initiator has skipped SecurityNegotiation, but authentication is required (RFC 7143
        // 6.3.1).
        if self.stage == Stage::Operational && terms.auth != Auth::None {
            return Err(fault(LoginStatus::AUTHENTICATION_FAILURE));
        }
        let group = u32::from(terms.portal_group);
        self.keys = Negotiation::new(terms.offer.with(Key::TargetPortalGroupTag, group));
        // This must be sent in the first response, if the initiator has specified a target (RFC
        // 7143 13.9).
        if identity.target.is_some() {
            self.keys.send_key(Key::TargetPortalGroupTag, out);
        }
        self.auth = terms.auth;
        Ok(())
    }

    fn negotiate<'a>(
        &mut self,
        pairs: &[(&'a str, &'a str)],
        out: &mut Vec<u8>,
    ) -> Result<ChapKeys<'a>, Refusal> {
        let identity = self.identity.clone().expect("identity is known");
        let context = KeyContext {
            from: Sender::Initiator,
            stage: self.stage,
            // The parameters are already fixed for a connection that joins a session, so it can't
            // use the keys of the leading login.
            leading: identity.tsih == Tsih(0),
            discovery: identity.discovery,
        };
        let mut chap = ChapKeys::default();
        for &(name, value) in pairs {
            // libiscsi sends its names again in the second stage if it has a secret but we don't
            // require authentication.
            if self.rounds > 1 && repeats(&identity, name, value) {
                continue;
            }
            let key = self.keys.handle_key(name, value, context, out);
            let key = key.map_err(|error| {
                let stage = self.stage;
                self.refuse(LoginFault::Key { stage, error })
            })?;
            let slot = match key {
                Some(Key::AuthMethod) => &mut chap.method,
                Some(Key::ChapA) => &mut chap.algorithms,
                Some(Key::ChapI) => &mut chap.id,
                Some(Key::ChapC) => &mut chap.challenge,
                Some(Key::ChapN) => &mut chap.name,
                Some(Key::ChapR) => &mut chap.response,
                _ => continue,
            };
            // In the key table, authentication keys can be sent more than once, because CHAP uses
            // multiple requests. This is still not allowed in a single request.
            if slot.replace(value).is_some() {
                let key = key.expect("authentication key");
                return Err(self.refuse(LoginFault::Repeated(key)));
            }
        }
        Ok(chap)
    }

    /// Declares our own limits.
    fn declare(&mut self, out: &mut Vec<u8>) {
        let discovery = self.identity.as_ref().is_some_and(|id| id.discovery);
        if discovery || !self.keys.is_rdma() {
            return self.keys.send_key(Key::MaxRecvDataSegmentLength, out);
        }
        // Linux fails the login if it receives an unknown key, so only send these keys if they have
        // been used by the initiator.
        for key in [Key::MaxOutstandingUnexpectedPdus, Key::MaxAhsLength] {
            if self.keys.has_seen(key) {
                self.keys.send_key(key, out);
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
            // CHAP can only be started once. If we accepted another AuthMethod, this would reset
            // the state and start again.
            if self.chap != Chap::Idle || !methods.split(',').any(|method| method == wanted) {
                return Err(failure());
            }
            text::put_pair(out, "AuthMethod", wanted);
            if wanted == "CHAP" {
                self.chap = Chap::Chosen;
            }
        }
        // The order is fixed (RFC 7143 12.1.3): algorithms after the method, then the response
        // after the challenge. Any other order must fail rather than start again.
        match (&self.chap, keys.algorithms, keys.response) {
            (Chap::Chosen, Some(offered), None) => {
                let Auth::Chap { algorithms, .. } = &self.auth else {
                    return Err(failure());
                };
                // Use the first algorithm in the initiator's list that we accept (RFC 7143 12.1.3).
                let mut offered = offered.split(',').filter_map(Algorithm::of);
                let first = offered.find(|algorithm| algorithms.contains(algorithm));
                let challenge = new_challenge(first.ok_or_else(failure)?, gate);
                text::put_pair(out, "CHAP_A", &(challenge.algorithm as u8).to_string());
                text::put_pair(out, "CHAP_I", &challenge.id.to_string());
                text::put_pair(out, "CHAP_C", &chap::encode(&challenge.bytes));
                self.chap = Chap::Challenged(challenge);
                Ok(())
            }
            (Chap::Challenged(challenge), None, Some(response)) => {
                self.claimed_name = keys.name.map(str::to_owned);
                let proved = self.check_response(challenge, keys, response, out)?;
                self.chap = Chap::Proved(proved);
                Ok(())
            }
            (_, None, None) => Ok(()),
            _ => Err(failure()),
        }
    }

    /// Checks the response and adds our own response if requested. Returns the credentials that
    /// were used.
    fn check_response(
        &self,
        sent: &Challenge,
        keys: &ChapKeys<'_>,
        response: &str,
        out: &mut Vec<u8>,
    ) -> Result<Credentials, Refusal> {
        let failure = || fault(LoginStatus::AUTHENTICATION_FAILURE);
        let Auth::Chap { accepted, own, .. } = &self.auth else {
            return Err(failure());
        };
        let name = keys.name.ok_or_else(failure)?;
        let known = accepted.iter().find(|known| known.name == name);
        // If the name is unknown, we still calculate a digest, so that the response time is the
        // same.
        let secret = known.map_or(&[][..], |known| &known.secret);
        let is_right = sent.is_valid_response(response, secret);
        let known = known.filter(|_| is_right).ok_or_else(failure)?;
        // The initiator hasn't requested mutual authentication. An identifier without a challenge
        // is an error, because there is nothing to calculate a response for.
        let Some(challenge) = keys.challenge else {
            return if keys.id.is_none() {
                Ok(known.clone())
            } else {
                Err(failure())
            };
        };
        // If we don't have our own credentials, we can't authenticate. This status is also used in
        // this case (RFC 7143 11.13.5: target authentication is not supported).
        let own = own.as_ref().ok_or_else(failure)?;
        let id = keys.id.and_then(chap::parse_id).ok_or_else(failure)?;
        let challenge = chap::decode(challenge).ok_or_else(failure)?;
        // If the initiator sends back our own challenge, it could use our response to authenticate.
        if chap::is_equal(&challenge, &sent.bytes) {
            return Err(failure());
        }
        let proof = sent.algorithm.respond(id, &own.secret, &challenge);
        text::put_pair(out, "CHAP_N", &own.name);
        text::put_pair(out, "CHAP_R", &chap::encode(&proof));
        Ok(known.clone())
    }

    /// Returns whether the current stage is complete.
    fn may_leave(&self) -> bool {
        match (self.stage, &self.auth, &self.chap) {
            (Stage::Security, Auth::Chap { .. }, chap) => matches!(chap, Chap::Proved(_)),
            _ => true,
        }
    }

    fn leave_stage(
        &mut self,
        next: Stage,
        gate: &mut dyn Gatekeeper,
        reply: &mut LoginReply,
    ) -> Result<(), Refusal> {
        reply.response.flags.transit = Some(next);
        self.stage = next;
        if next != Stage::FullFeature {
            return Ok(());
        }
        let identity = self.identity.clone().expect("identity is known");
        let joined = CompletedLogin {
            session: session_params(&self.keys, identity.discovery),
            connection: connection_params(&self.keys, Sender::Target, identity.discovery),
            credentials: match &self.chap {
                Chap::Proved(proved) => Some(proved.clone()),
                _ => None,
            },
            identity,
        };
        // This must be the last step, so that a failed login never creates a session or replaces an
        // existing one.
        reply.response.tsih = gate.join(&joined).map_err(fault)?;
        reply.outcome = Outcome::FullFeature(Box::new(joined));
        Ok(())
    }
}

fn new_challenge(algorithm: Algorithm, gate: &mut dyn Gatekeeper) -> Challenge {
    let mut random = [0; CHALLENGE_LEN + 1];
    gate.random(&mut random);
    // RFC 1994 requires a different identifier for each challenge. By using a random value, we
    // don't need a shared counter.
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

/// Returns whether the initiator has sent the same declaration again.
fn repeats(identity: &Identity, name: &str, value: &str) -> bool {
    let is = |known: &IscsiName| IscsiName::new(value).is_ok_and(|name| name == *known);
    match Key::of(name) {
        Some(Key::InitiatorName) => is(&identity.initiator),
        Some(Key::TargetName) => identity.target.as_ref().is_some_and(is),
        Some(Key::SessionType) => (value == "Discovery") == identity.discovery,
        // This is never used.
        Some(Key::InitiatorAlias) => true,
        _ => false,
    }
}
