//! The initiator's side.

use super::super::chap::{self, ALGORITHMS, Algorithm, CHALLENGE_LEN, Challenge, Credentials};
use super::super::keys::{Key, KeyContext, KeyError, MAX_ANSWER, Negotiation, Offer, Sender};
use super::super::name::{IscsiName, TargetAddress};
use super::super::pdu::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
use super::super::text::{self, Collector, TextError};
use super::super::{Cid, CmdSn, Isid, Itt, StatSn, Tsih};
use super::{ConnectionParams, MAX_ROUNDS, SessionParams, connection_params, session_params};

/// Configuration of an initiator's login.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// Name of the initiator.
    pub name: IscsiName,
    /// The target; none for a discovery session.
    pub target: Option<IscsiName>,
    /// ISID of the session.
    pub isid: Isid,
    /// The session to join; zero for a new one.
    pub tsih: Tsih,
    /// CID of the connection.
    pub cid: Cid,
    /// CmdSN that the session begins with.
    pub cmd_sn: CmdSn,
    /// With what it proves who it is.
    pub credentials: Option<Credentials>,
    /// Credentials that the target has to prove; only together with `credentials`.
    pub target_credentials: Option<Credentials>,
    /// The values that it agrees on.
    pub offer: Offer,
    /// Keys that it offers, besides MaxRecvDataSegmentLength.
    pub keys: Vec<Key>,
}

/// Reason of a failed login.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoginError {
    /// The target refused it.
    #[error("the target refused the login: {why} (status {0})", why = .0.meaning())]
    Refused(LoginStatus),
    /// The target did not prove who it is.
    #[error("the target failed to authenticate itself")]
    TargetNotProved,
    /// The target wants what we have no credentials for.
    #[error("the target asks for authentication in a way that is not configured")]
    Method,
    /// A response that does not fit the request.
    #[error("the response breaks the protocol: {0}")]
    Protocol(&'static str),
    /// Keys that are not legal.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Text that is not legal.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// The step after a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoginStep {
    /// Send the request of [`InitiatorLogin::poll_request`].
    Send,
    /// The full-feature phase begins.
    FullFeature {
        /// TSIH that the target has given the session.
        tsih: Tsih,
        /// The portal group that the session is with, if the target declared it (RFC 7143 13.9).
        portal_group: Option<u16>,
        /// Parameters of the session.
        session: SessionParams,
        /// Parameters of the connection.
        connection: ConnectionParams,
    },
    /// Log in at another address.
    Redirect {
        /// Address of the other portal.
        to: TargetAddress,
        /// The target has moved permanently.
        permanent: bool,
    },
}

/// The login of one connection.
#[derive(Debug)]
pub struct InitiatorLogin {
    config: InitiatorConfig,
    stage: Stage,
    wants: Option<Stage>,
    keys: Negotiation,
    /// Digests that it takes for CHAP, the best first.
    algorithms: Vec<Algorithm>,
    challenge: Challenge,
    challenged: bool,
    /// The target asks for no proof.
    is_unasked: bool,
    proved: bool,
    next: Option<Vec<u8>>,
    collector: Collector,
    rounds: u32,
}

impl InitiatorLogin {
    /// A login that has sent nothing. `random` must be unpredictable.
    #[must_use]
    pub fn new(config: InitiatorConfig, random: [u8; CHALLENGE_LEN + 1]) -> Self {
        let [id, bytes @ ..] = random;
        let keys = Negotiation::new(config.offer);
        let mut first = Vec::new();
        text::put(&mut first, "InitiatorName", config.name.as_str());
        match &config.target {
            Some(target) => {
                text::put(&mut first, "TargetName", target.as_str());
                // A connection that joins a session has its type.
                if config.tsih == Tsih(0) {
                    text::put(&mut first, "SessionType", "Normal");
                }
            }
            None => text::put(&mut first, "SessionType", "Discovery"),
        }
        // Who asks no proof of the target loses nothing by going without where it asks for none, as
        // portals do in discovery that want proof in normal sessions.
        let (method, wants) = match (&config.credentials, &config.target_credentials) {
            (Some(_), Some(_)) => ("CHAP", None),
            (Some(_), None) => ("CHAP,None", None),
            (None, _) => ("None", Some(Stage::Operational)),
        };
        text::put(&mut first, "AuthMethod", method);
        Self {
            config,
            stage: Stage::Security,
            wants,
            keys,
            algorithms: ALGORITHMS.to_vec(),
            challenge: Challenge {
                algorithm: Algorithm::Md5,
                id,
                bytes,
            },
            challenged: false,
            is_unasked: false,
            proved: false,
            next: Some(first),
            collector: Collector::default(),
            rounds: 0,
        }
    }

    /// The same, with no other digests for CHAP than these, the best first. Some targets know
    /// others by the numbers of the newer ones.
    #[must_use]
    pub fn with_algorithms(mut self, algorithms: Vec<Algorithm>) -> Self {
        self.algorithms = algorithms;
        self
    }

    /// The next request and its text, once.
    pub fn poll_request(&mut self) -> Option<(LoginRequest, Vec<u8>)> {
        let text = self.next.take()?;
        let request = LoginRequest {
            flags: LoginFlags {
                current: self.stage,
                transit: self.wants,
                continues: false,
            },
            version_max: 0,
            version_min: 0,
            isid: self.config.isid,
            tsih: self.config.tsih,
            itt: Itt(0),
            cid: self.config.cid,
            cmd_sn: self.config.cmd_sn,
            exp_stat_sn: StatSn(0),
        };
        Some((request, text))
    }

    /// Takes a response and its text.
    ///
    /// # Errors
    /// [`LoginError`]: the connection cannot be used any longer.
    pub fn handle_response(
        &mut self,
        response: &LoginResponse,
        data: &[u8],
    ) -> Result<LoginStep, LoginError> {
        // What this response brings may ask for another stage, but with the next request only.
        let asked = self.wants;
        self.rounds += 1;
        // A target that answers for ever without T would keep the login going, each answer in
        // time.
        if self.rounds > MAX_ROUNDS {
            return Err(LoginError::Protocol("a login without end"));
        }
        // A refusal comes first: of its other fields only TSIH and the numbers need be valid.
        if response.status != LoginStatus::SUCCESS {
            return refused(response.status, data);
        }
        if response.isid != self.config.isid || response.version_active != 0 {
            return Err(LoginError::Protocol("another session or version"));
        }
        // A stage is left by T and NSG only, so the response to a request is of the stage of that
        // request.
        if response.flags.current != self.stage {
            return Err(LoginError::Protocol("another stage"));
        }
        // More of the text follows, and is asked for by an empty request (RFC 7143 6.2).
        let Some(text) = self.collector.take(data, response.flags.continues)? else {
            self.next = Some(Vec::new());
            return Ok(LoginStep::Send);
        };
        let pairs = text::pairs(&text).collect::<Result<Vec<_>, _>>()?;
        // Keys come before the stage changes: they belong to the stage that is about to end.
        let mut answer = self.take_keys(&pairs)?;
        if response.flags.transit == Some(Stage::FullFeature) && !is_settled(&answer, &pairs) {
            return Err(LoginError::Protocol("an offer without time for an answer"));
        }
        if self.stage == Stage::Security {
            self.authenticate(&pairs, &mut answer)?;
        }
        match response.flags.transit {
            // A target must not go on where it was not asked to (RFC 7143 11.13.6), and could skip
            // CHAP so.
            Some(next) if Some(next) != asked => {
                Err(LoginError::Protocol("a stage that was not asked for"))
            }
            Some(next) => self.enter(next, response.tsih, answer),
            None => {
                self.next = Some(answer);
                Ok(LoginStep::Send)
            }
        }
    }

    /// Takes keys of the target; returns the answers to those that it offers.
    fn take_keys(&mut self, pairs: &[(&str, &str)]) -> Result<Vec<u8>, LoginError> {
        let context = KeyContext {
            from: Sender::Target,
            stage: self.stage,
            leading: self.config.tsih == Tsih(0),
            discovery: self.config.target.is_none(),
        };
        let mut out = Vec::new();
        for (name, value) in pairs {
            self.keys.conclude(name, value, context, &mut out)?;
        }
        Ok(out)
    }

    fn authenticate(
        &mut self,
        pairs: &[(&str, &str)],
        out: &mut Vec<u8>,
    ) -> Result<(), LoginError> {
        let value = |key: &str| {
            let found = pairs.iter().find(|(name, _)| *name == key);
            found.map(|(_, value)| *value)
        };
        if let Some(method) = value("AuthMethod") {
            match method {
                "CHAP" if self.config.credentials.is_some() => {
                    let numbers = self.algorithms.iter().map(|a| (*a as u8).to_string());
                    text::put(out, "CHAP_A", &numbers.collect::<Vec<_>>().join(","));
                }
                // Only where no proof of the target is wanted: otherwise any target could get out
                // of it by this answer.
                "None" if self.config.target_credentials.is_none() => {
                    self.is_unasked = true;
                    self.wants = Some(Stage::Operational);
                }
                _ => return Err(LoginError::Method),
            }
        }
        let Some(own) = &self.config.credentials else {
            return Ok(());
        };
        if let Some(challenge) = value("CHAP_C") {
            // A target that may ask again and again could have many challenges of others answered.
            if std::mem::replace(&mut self.challenged, true) {
                return Err(LoginError::Protocol("a second challenge"));
            }
            let algorithm = value("CHAP_A").and_then(Algorithm::of);
            // It must be one that was offered, or a target could choose a weaker digest.
            let algorithm = algorithm.filter(|a| self.algorithms.contains(a));
            let id = value("CHAP_I").and_then(chap::parse_id);
            let (Some(algorithm), Some(id), Some(bytes)) = (algorithm, id, chap::decode(challenge))
            else {
                return Err(LoginError::Protocol("a challenge that is none"));
            };
            // One secret proves one side only: a target that knows ours could be any.
            self.challenge.algorithm = algorithm;
            let proof = algorithm.respond(id, &own.secret, &bytes);
            text::put(out, "CHAP_N", &own.name);
            text::put(out, "CHAP_R", &chap::encode(&proof));
            if self.config.target_credentials.is_some() {
                // RFC 7143 9.2.1: a target that does not know the secret could have us answer the
                // challenge that we are about to send.
                if chap::is_equal(&bytes, &self.challenge.bytes) {
                    return Err(LoginError::Protocol("our own challenge"));
                }
                text::put(out, "CHAP_I", &self.challenge.id.to_string());
                text::put(out, "CHAP_C", &chap::encode(&self.challenge.bytes));
            }
            self.wants = Some(Stage::Operational);
        }
        if let (Some(response), Some(theirs)) = (value("CHAP_R"), &self.config.target_credentials) {
            // The name is checked with the response: a secret of another target proves nothing
            // about this one.
            let is_named = value("CHAP_N") == Some(theirs.name.as_str());
            self.proved = self.challenged
                && is_named
                && self.challenge.is_answered_by(response, &theirs.secret);
        }
        Ok(())
    }

    /// Goes on to the next stage, with answers to what the target offered in the one before.
    fn enter(
        &mut self,
        next: Stage,
        tsih: Tsih,
        mut out: Vec<u8>,
    ) -> Result<LoginStep, LoginError> {
        // A target that skips CHAP must not pass for the one that was meant (RFC 7143 12.1.3).
        if self.stage == Stage::Security {
            if self.config.credentials.is_some() && !self.challenged && !self.is_unasked {
                return Err(LoginError::TargetNotProved);
            }
            if self.config.target_credentials.is_some() && !self.proved {
                return Err(LoginError::TargetNotProved);
            }
        }
        self.stage = next;
        let discovery = self.config.target.is_none();
        if next == Stage::FullFeature {
            let declared = self.keys.has_seen(Key::TargetPortalGroupTag);
            return Ok(LoginStep::FullFeature {
                tsih,
                portal_group: declared
                    .then(|| self.keys.peer().of(Key::TargetPortalGroupTag) as u16),
                session: session_params(&self.keys, discovery),
                connection: connection_params(&self.keys, Sender::Initiator, discovery),
            });
        }
        self.wants = Some(Stage::FullFeature);
        // Over RDMA two other keys take its place (RFC 7145 6.2), except in discovery sessions,
        // where those have no meaning.
        if discovery || !self.keys.is_rdma() {
            self.keys.say(Key::MaxRecvDataSegmentLength, &mut out);
        }
        for key in &self.config.keys {
            if !discovery || key.row().in_discovery {
                self.keys.say(*key, &mut out);
            }
        }
        // What a target takes before it has declared more (RFC 7143 13.12).
        if out.len() > MAX_ANSWER {
            return Err(KeyError::TooMany.into());
        }
        self.next = Some(out);
        Ok(LoginStep::Send)
    }
}

/// Returns whether a negotiation is over, though these answers to the target's offers cannot be
/// sent: they agree, or are about keys that mean nothing here.
fn is_settled(answers: &[u8], offers: &[(&str, &str)]) -> bool {
    text::pairs(answers).all(|answer| {
        answer.is_ok_and(|(name, value)| {
            matches!(value, "Irrelevant" | "NotUnderstood") || offers.contains(&(name, value))
        })
    })
}

/// A refusal, or the way to where the target has gone.
fn refused(status: LoginStatus, data: &[u8]) -> Result<LoginStep, LoginError> {
    // Class 1 is a redirection and must name an address (RFC 7143 11.13.5); every other one ends
    // the login.
    if status.class != 1 {
        return Err(LoginError::Refused(status));
    }
    let address = text::pairs(data)
        .filter_map(Result::ok)
        .find(|(name, _)| *name == "TargetAddress")
        .and_then(|(_, value)| TargetAddress::parse(value));
    let to = address.ok_or(LoginError::Protocol("a redirection to nowhere"))?;
    Ok(LoginStep::Redirect {
        to,
        permanent: status == LoginStatus::MOVED_PERMANENTLY,
    })
}
