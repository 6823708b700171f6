//! Login PDUs (RFC 7143 11.12, 11.13).

use num_enum::{IntoPrimitive, TryFromPrimitive};

use super::super::frame::Frame;
use super::super::raw::{RawLoginRequest, RawLoginResponse};
use super::super::{BHS_LEN, Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih};
use super::{CONTINUE, FINAL, IMMEDIATE, Opcode, PduError, coded};

/// Stage of a login (RFC 7143 11.12.3).
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, TryFromPrimitive, IntoPrimitive,
)]
#[repr(u8)]
pub enum Stage {
    /// SecurityNegotiation: authentication is agreed on and done.
    Security = 0,
    /// LoginOperationalNegotiation: all other keys are negotiated.
    Operational = 1,
    /// FullFeaturePhase: commands may be sent.
    FullFeature = 3,
}

/// T, C, CSG and NSG of a login PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginFlags {
    /// CSG: the current stage.
    pub current: Stage,
    /// T with NSG: the stage that the sender wants to go to, or agrees to.
    pub transit: Option<Stage>,
    /// C: the text goes on in the next PDU.
    pub continues: bool,
}

impl LoginFlags {
    fn parse(byte: u8) -> Result<Self, PduError> {
        let current = coded("CSG", byte >> 2 & 3)?;
        // NSG is reserved while T is zero (RFC 7143 11.12.3), so it is not even looked at.
        let transit: Option<Stage> = match byte & FINAL {
            0 => None,
            _ => Some(coded("NSG", byte & 3)?),
        };
        let continues = byte & CONTINUE != 0;
        // Stages only go forward, and no login PDU belongs to the full-feature phase (RFC 7143
        // 6.3).
        if current == Stage::FullFeature || transit.is_some_and(|next| next <= current) {
            return Err(PduError::Field {
                field: "CSG and NSG",
                value: u32::from(byte),
            });
        }
        // A stage cannot end in the middle of a text (RFC 7143 6.2).
        if continues && transit.is_some() {
            return Err(PduError::Field {
                field: "T and C",
                value: u32::from(byte),
            });
        }
        Ok(Self {
            current,
            transit,
            continues,
        })
    }

    fn byte(self) -> u8 {
        let transit = self.transit.map_or(0, |next| FINAL | u8::from(next));
        transit | if self.continues { CONTINUE } else { 0 } | u8::from(self.current) << 2
    }
}

/// A login request. Its text is the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginRequest {
    /// Stages and bits of byte 1.
    pub flags: LoginFlags,
    /// Highest version that the initiator has.
    pub version_max: u8,
    /// Version-min: the lowest version that the initiator supports.
    pub version_min: u8,
    /// ISID of the session (RFC 7143 11.12.5).
    pub isid: Isid,
    /// The session to join; zero for a new one.
    pub tsih: Tsih,
    /// Tag, the same through the login.
    pub itt: Itt,
    /// CID of the connection.
    pub cid: Cid,
    /// Sequence number that the session begins with.
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all statuses before it (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
}

impl LoginRequest {
    pub(super) fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawLoginRequest::of(frame.bhs);
        Ok(Self {
            flags: LoginFlags::parse(raw.flags)?,
            version_max: raw.byte2,
            version_min: raw.byte3,
            isid: Isid(raw.isid),
            tsih: Tsih(raw.tsih.get()),
            itt: Itt(raw.itt.get()),
            cid: Cid(raw.cid.get()),
            cmd_sn: CmdSn(raw.cmd_sn.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
        })
    }

    /// The basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawLoginRequest {
            opcode: u8::from(Opcode::LoginRequest) | IMMEDIATE,
            flags: self.flags.byte(),
            byte2: self.version_max,
            byte3: self.version_min,
            isid: self.isid.0,
            tsih: self.tsih.0.into(),
            itt: self.itt.0.into(),
            cid: self.cid.0.into(),
            cmd_sn: self.cmd_sn.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            ..RawLoginRequest::default()
        }
        .bytes()
    }
}

/// Status of a login (RFC 7143 11.13.5): class and detail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LoginStatus {
    /// 0 success, 1 redirection, 2 the initiator's error, 3 the target's.
    pub class: u8,
    /// Status-Detail, which depends on the class.
    pub detail: u8,
}

/// Writes the statuses: class, detail, name for counters, meaning for people.
macro_rules! statuses {
    ($(#[doc = $doc:literal] $status:ident = $class:literal, $detail:literal, $name:literal, $meaning:literal;)*) => {
        impl LoginStatus {
            $(#[doc = $doc] pub const $status: Self = Self { class: $class, detail: $detail };)*

            /// Its name, for counters.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$status => $name,)*
                    _ => "other",
                }
            }

            /// The meaning, for people.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$status => $meaning,)*
                    Self { class: 2, .. } => "the initiator is at fault",
                    _ => "the target is at fault",
                }
            }
        }
    };
}

statuses! {
    /// The login goes on or is complete.
    SUCCESS = 0, 0, "success", "success";
    /// The target has moved for now; TargetAddress says where.
    MOVED_TEMPORARILY = 1, 1, "moved_temporarily", "the target has moved";
    /// The target has moved for good.
    MOVED_PERMANENTLY = 1, 2, "moved_permanently", "the target has moved";
    /// Something else is wrong with the initiator.
    INITIATOR_ERROR = 2, 0, "initiator_error", "the initiator is at fault";
    /// It did not prove who it is.
    AUTHENTICATION_FAILURE = 2, 1, "authentication_failure", "authentication failed";
    /// It may not use the target.
    AUTHORIZATION_FAILURE = 2, 2, "authorization_failure", "this initiator may not use the target";
    /// The target does not exist.
    NOT_FOUND = 2, 3, "not_found", "there is no such target";
    /// The target was removed.
    TARGET_REMOVED = 2, 4, "target_removed", "the target was removed";
    /// The initiator supports no version that we do.
    UNSUPPORTED_VERSION = 2, 5, "unsupported_version", "no common version";
    /// The session has as many connections as it may.
    TOO_MANY_CONNECTIONS = 2, 6, "too_many_connections", "too many connections";
    /// A key is missing.
    MISSING_PARAMETER = 2, 7, "missing_parameter", "a key is missing";
    /// The connection cannot join the session.
    CANNOT_INCLUDE = 2, 8, "cannot_include", "the connection cannot join the session";
    /// That type of session is not supported.
    SESSION_TYPE = 2, 9, "session_type", "the type of session is not supported";
    /// The session does not exist.
    NO_SUCH_SESSION = 2, 10, "no_such_session", "there is no such session";
    /// Not a login request.
    INVALID_DURING_LOGIN = 2, 11, "invalid_during_login", "not a login request";
    /// The target itself is at fault.
    TARGET_ERROR = 3, 0, "target_error", "the target is at fault";
    /// The target does not work now.
    SERVICE_UNAVAILABLE = 3, 1, "service_unavailable", "the target does not work now";
    /// Not enough of something.
    OUT_OF_RESOURCES = 3, 2, "out_of_resources", "the target lacks resources";
}

impl std::fmt::Display for LoginStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x}{:02x}h", self.class, self.detail)
    }
}

/// A login response. Its text is the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginResponse {
    /// Stages and bits of byte 1.
    pub flags: LoginFlags,
    /// Highest version that the target has.
    pub version_max: u8,
    /// The version in use.
    pub version_active: u8,
    /// As in the request.
    pub isid: Isid,
    /// The session, in the last response.
    pub tsih: Tsih,
    /// As in the request.
    pub itt: Itt,
    /// Status-Class and Status-Detail (RFC 7143 11.13.5).
    pub status: LoginStatus,
}

impl LoginResponse {
    /// The basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawLoginResponse {
            opcode: Opcode::LoginResponse.into(),
            flags: self.flags.byte(),
            byte2: self.version_max,
            byte3: self.version_active,
            isid: self.isid.0,
            tsih: self.tsih.0.into(),
            itt: self.itt.0.into(),
            stat_sn: numbers.stat_sn.0.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.0.into(),
            max_cmd_sn: numbers.max_cmd_sn.0.into(),
            status_class: self.status.class,
            status_detail: self.status.detail,
            ..RawLoginResponse::default()
        }
        .bytes()
    }

    pub(super) fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawLoginResponse::of(frame.bhs);
        let status = LoginStatus {
            class: raw.status_class,
            detail: raw.status_detail,
        };
        // The stages of a refusal mean nothing.
        let flags = match LoginFlags::parse(raw.flags) {
            Err(_) if status.class != 0 => LoginFlags {
                current: Stage::Security,
                transit: None,
                continues: false,
            },
            other => other?,
        };
        Ok(Self {
            flags,
            version_max: raw.byte2,
            version_active: raw.byte3,
            isid: Isid(raw.isid),
            tsih: Tsih(raw.tsih.get()),
            itt: Itt(raw.itt.get()),
            status,
        })
    }
}
