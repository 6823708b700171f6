//! Login state machine for an initiator.

use super::super::chap::{self, ALGORITHMS, Algorithm, CHALLENGE_LEN, Challenge, Credentials};
use super::super::keys::{Key, KeyContext, KeyError, MAX_RESPONSE, Negotiation, Offer, Sender};
use super::super::name::{IscsiName, TargetAddress};
use super::super::pdu::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
use super::super::text::{self, Collector, TextError};
use super::super::{Cid, CmdSn, Isid, Itt, StatSn, Tsih};
use super::{ConnectionParams, MAX_ROUNDS, SessionParams, connection_params, session_params};

/// Login configuration of an initiator.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// Initiator name.
    pub name: IscsiName,
    /// Target name, or `None` for a discovery session.
    pub target: Option<IscsiName>,
    /// ISID of this session.
    pub isid: Isid,
    /// The session to join, or zero to create a new session.
    pub tsih: Tsih,
    /// CID of this connection.
    pub cid: Cid,
    /// Initial CmdSN of the session.
    pub cmd_sn: CmdSn,
    /// Credentials used to authenticate the initiator.
    pub credentials: Option<Credentials>,
    /// Credentials used to authenticate the target. This requires `credentials`.
    pub target_credentials: Option<Credentials>,
    /// The values that can be accepted.
    pub offer: Offer,
    /// Keys to offer in addition to MaxRecvDataSegmentLength.
    pub keys: Vec<Key>,
}

/// The reason why a login has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LoginError {
    /// The login was refused by the target.
    #[error("the target refused the login: {why} (status {0})", why = .0.meaning())]
    Refused(LoginStatus),
    /// The target was not authenticated.
    #[error("the target failed to authenticate itself")]
    TargetNotProved,
    /// The target requires a method for which we don't have any credentials.
    #[error("the target requires an authentication method that is not configured")]
    Method,
    /// The response does not match the request.
    #[error("invalid login response: {0}")]
    Protocol(&'static str),
    /// Failed to negotiate a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The text is invalid.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// The next step after a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoginStep {
    /// Send the request returned by [`InitiatorLogin::poll_request`].
    Send,
    /// Start the full-feature phase.
    FullFeature {
        /// TSIH assigned by the target.
        tsih: Tsih,
        /// Portal group of the session, if this was declared by the target (RFC 7143 13.9).
        portal_group: Option<u16>,
        /// Session parameters.
        session: SessionParams,
        /// Connection parameters.
        connection: ConnectionParams,
    },
    /// Log in at a different address.
    Redirect {
        /// Address of the new portal.
        to: TargetAddress,
        /// Set when the target has moved permanently.
        permanent: bool,
    },
}

/// State of the login for a single connection.
#[derive(Debug)]
pub struct InitiatorLogin {
    config: InitiatorConfig,
    stage: Stage,
    wants: Option<Stage>,
    keys: Negotiation,
    /// CHAP algorithms that we accept, sorted from strongest to weakest.
    algorithms: Vec<Algorithm>,
    challenge: Challenge,
    challenged: bool,
    /// Set when the target doesn't require authentication.
    is_auth_skipped: bool,
    proved: bool,
    next: Option<Vec<u8>>,
    collector: Collector,
    rounds: u32,
}

impl InitiatorLogin {
    /// Creates a new login. `random` must be unpredictable.
    #[must_use]
    pub fn new(config: InitiatorConfig, random: [u8; CHALLENGE_LEN + 1]) -> Self {
        let [id, bytes @ ..] = random;
        let keys = Negotiation::new(config.offer);
        let mut first = Vec::new();
        text::put_pair(&mut first, "InitiatorName", config.name.as_str());
        match &config.target {
            Some(target) => {
                text::put_pair(&mut first, "TargetName", target.as_str());
                // If this connection joins a session, the type is already known.
                if config.tsih == Tsih(0) {
                    text::put_pair(&mut first, "SessionType", "Normal");
                }
            }
            None => text::put_pair(&mut first, "SessionType", "Discovery"),
        }
        // If we don't need to authenticate the target, we can also log in without authentication if
        // this is allowed. For example, a portal may not require it for discovery, but only for
        // normal sessions.
        let (method, wants) = match (&config.credentials, &config.target_credentials) {
            (Some(_), Some(_)) => ("CHAP", None),
            (Some(_), None) => ("CHAP,None", None),
            (None, _) => ("None", Some(Stage::Operational)),
        };
        text::put_pair(&mut first, "AuthMethod", method);
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
            is_auth_skipped: false,
            proved: false,
            next: Some(first),
            collector: Collector::default(),
            rounds: 0,
        }
    }

    /// Sets the CHAP algorithms that can be used, sorted from strongest to weakest. Some targets
    /// use the numbers of the newer algorithms for something else.
    #[must_use]
    pub fn with_algorithms(mut self, algorithms: Vec<Algorithm>) -> Self {
        self.algorithms = algorithms;
        self
    }

    /// Returns the next request with its text. This is only returned once.
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

    /// Handles a response with its text.
    ///
    /// # Errors
    /// [`LoginError`]: the connection cannot be used any more.
    pub fn handle_response(
        &mut self,
        response: &LoginResponse,
        data: &[u8],
    ) -> Result<LoginStep, LoginError> {
        // This response may change the requested stage, but only for the next request.
        let requested = self.wants;
        self.rounds += 1;
        // Without this limit, a target could keep the login going forever by never setting T, even
        // if each response is received before the timeout.
        if self.rounds > MAX_ROUNDS {
            return Err(LoginError::Protocol("too many rounds"));
        }
        // Check for errors first, because in this case only TSIH and the sequence numbers must be
        // valid.
        if response.status != LoginStatus::SUCCESS {
            return refused(response.status, data);
        }
        if response.isid != self.config.isid || response.version_active != 0 {
            return Err(LoginError::Protocol("unexpected ISID or version"));
        }
        // The stage can only be changed using T and NSG, so the response must be for the same stage
        // as the request.
        if response.flags.current != self.stage {
            return Err(LoginError::Protocol("unexpected stage"));
        }
        // There is more text, so send an empty request to receive it (RFC 7143 6.2).
        let Some(text) = self.collector.add_part(data, response.flags.continues)? else {
            self.next = Some(Vec::new());
            return Ok(LoginStep::Send);
        };
        let pairs = text::pairs(&text).collect::<Result<Vec<_>, _>>()?;
        // Process the keys before the stage is changed, because they are for the current stage.
        let mut reply = self.take_keys(&pairs)?;
        if response.flags.transit == Some(Stage::FullFeature) && !is_agreed(&reply, &pairs) {
            return Err(LoginError::Protocol("offer that requires another response"));
        }
        if self.stage == Stage::Security {
            self.authenticate(&pairs, &mut reply)?;
        }
        match response.flags.transit {
            // A target must not change the stage if this was not requested (RFC 7143 11.13.6). This
            // could be used to skip CHAP.
            Some(next) if Some(next) != requested => {
                Err(LoginError::Protocol("stage transition was not requested"))
            }
            Some(next) => self.start_stage(next, response.tsih, reply),
            None => {
                self.next = Some(reply);
                Ok(LoginStep::Send)
            }
        }
    }

    /// Processes keys sent by the target. Returns the responses to keys that were offered.
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
                    text::put_pair(out, "CHAP_A", &numbers.collect::<Vec<_>>().join(","));
                }
                // Only accept this if we don't need to authenticate the target. Otherwise, a target
                // could just send this to avoid it.
                "None" if self.config.target_credentials.is_none() => {
                    self.is_auth_skipped = true;
                    self.wants = Some(Stage::Operational);
                }
                _ => return Err(LoginError::Method),
            }
        }
        let Some(own) = &self.config.credentials else {
            return Ok(());
        };
        if let Some(challenge) = value("CHAP_C") {
            // If this was allowed more than once, a target could use us to get responses to
            // challenges that it has received from other targets.
            if std::mem::replace(&mut self.challenged, true) {
                return Err(LoginError::Protocol("second CHAP challenge"));
            }
            let algorithm = value("CHAP_A").and_then(Algorithm::of);
            // This must be an algorithm that we have offered, otherwise the target could select a
            // weaker one.
            let algorithm = algorithm.filter(|a| self.algorithms.contains(a));
            let id = value("CHAP_I").and_then(chap::parse_id);
            let (Some(algorithm), Some(id), Some(bytes)) = (algorithm, id, chap::decode(challenge))
            else {
                return Err(LoginError::Protocol("malformed CHAP challenge"));
            };
            // Note that this only authenticates the initiator. Our secret may be known to other
            // targets too, so this says nothing about the target.
            self.challenge.algorithm = algorithm;
            let proof = algorithm.respond(id, &own.secret, &bytes);
            text::put_pair(out, "CHAP_N", &own.name);
            text::put_pair(out, "CHAP_R", &chap::encode(&proof));
            if self.config.target_credentials.is_some() {
                // A target that doesn't know the secret could send back our challenge to get a
                // valid response (RFC 7143 9.2.1).
                if chap::is_equal(&bytes, &self.challenge.bytes) {
                    return Err(LoginError::Protocol("reflected CHAP challenge"));
                }
                text::put_pair(out, "CHAP_I", &self.challenge.id.to_string());
                text::put_pair(out, "CHAP_C", &chap::encode(&self.challenge.bytes));
            }
            self.wants = Some(Stage::Operational);
        }
        if let (Some(response), Some(theirs)) = (value("CHAP_R"), &self.config.target_credentials) {
            // The name must also match, because the secret of some other target can't be used to
            // authenticate this target.
            let is_named = value("CHAP_N") == Some(theirs.name.as_str());
            self.proved = self.challenged
                && is_named
                && self.challenge.is_valid_response(response, &theirs.secret);
        }
        Ok(())
    }

    /// Starts the next stage. `out` already contains the responses to keys that were offered by the
    /// target.
    fn start_stage(
        &mut self,
        next: Stage,
        tsih: Tsih,
        mut out: Vec<u8>,
    ) -> Result<LoginStep, LoginError> {
        // Don't allow a target to skip CHAP, because it could be a different target (RFC 7143
        // 12.1.3).
        if self.stage == Stage::Security {
            if self.config.credentials.is_some() && !self.challenged && !self.is_auth_skipped {
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
        // With RDMA, this is replaced by two other keys (RFC 7145 6.2), except for discovery
        // sessions, in which these can't be used.
        if discovery || !self.keys.is_rdma() {
            self.keys.send_key(Key::MaxRecvDataSegmentLength, &mut out);
        }
        for key in &self.config.keys {
            if !discovery || key.row().in_discovery {
                self.keys.send_key(*key, &mut out);
            }
        }
        // This is the default limit for a target until it declares a larger value (RFC 7143 13.12).
        if out.len() > MAX_RESPONSE {
            return Err(KeyError::TooMany.into());
        }
        self.next = Some(out);
        Ok(LoginStep::Send)
    }
}

/// Returns whether the negotiation is complete, even though we cannot send these responses. This is
/// the case if the responses are the same as the offers, or if the keys are not used here.
fn is_agreed(replies: &[u8], offers: &[(&str, &str)]) -> bool {
    text::pairs(replies).all(|pair| {
        pair.is_ok_and(|(name, value)| {
            matches!(value, "Irrelevant" | "NotUnderstood") || offers.contains(&(name, value))
        })
    })
}

/// Handles a failed login or a redirection.
fn refused(status: LoginStatus, data: &[u8]) -> Result<LoginStep, LoginError> {
    // Class 1 is used for redirection, which must contain an address (RFC 7143 11.13.5). In any
    // other case, the login has failed.
    if status.class != 1 {
        return Err(LoginError::Refused(status));
    }
    let address = text::pairs(data)
        .filter_map(Result::ok)
        .find(|(name, _)| *name == "TargetAddress")
        .and_then(|(_, value)| TargetAddress::parse(value));
    let to = address.ok_or(LoginError::Protocol("missing or invalid TargetAddress"))?;
    Ok(LoginStep::Redirect {
        to,
        permanent: status == LoginStatus::MOVED_PERMANENTLY,
    })
}
