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
    /// SecurityNegotiation: used for authentication.
    Security = 0,
    /// LoginOperationalNegotiation: used to negotiate all other keys.
    Operational = 1,
    /// FullFeaturePhase: commands can be sent.
    FullFeature = 3,
}

/// T, C, CSG and NSG fields in a login PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginFlags {
    /// CSG: the current stage.
    pub current: Stage,
    /// T and NSG: the next stage requested or accepted by the sender.
    pub transit: Option<Stage>,
    /// C: the text continues in the next PDU.
    pub continues: bool,
}

impl LoginFlags {
    fn parse(byte: u8) -> Result<Self, PduError> {
        let current = coded("CSG", byte >> 2 & 3)?;
        // NSG is reserved if T is not set (RFC 7143 11.12.3), so we should ignore it.
        let transit: Option<Stage> = match byte & FINAL {
            0 => None,
            _ => Some(coded("NSG", byte & 3)?),
        };
        let continues = byte & CONTINUE != 0;
        // The stage can't go back, and login PDUs are not used in the full-feature phase (RFC 7143
        // 6.3).
        if current == Stage::FullFeature || transit.is_some_and(|next| next <= current) {
            return Err(PduError::Field {
                field: "CSG and NSG",
                value: u32::from(byte),
            });
        }
        // Can't leave the stage if the text is incomplete (RFC 7143 6.2).
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

/// A login request. The text is in the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginRequest {
    /// Stages and flags in byte 1.
    pub flags: LoginFlags,
    /// Version-max: the highest version supported by the initiator.
    pub version_max: u8,
    /// Version-min: the lowest version supported by the initiator.
    pub version_min: u8,
    /// ISID of the session (RFC 7143 11.12.5).
    pub isid: Isid,
    /// The session to join, or zero to create a new session.
    pub tsih: Tsih,
    /// Initiator Task Tag, which must not change during the login.
    pub itt: Itt,
    /// CID of this connection.
    pub cid: Cid,
    /// Initial CmdSN of the session.
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
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

    /// Returns the basic header segment.
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

/// Login status (RFC 7143 11.13.5), with a class and a detail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LoginStatus {
    /// 0 for success, 1 for redirection, 2 for an initiator error, 3 for a target error.
    pub class: u8,
    /// Status-Detail, depending on the class.
    pub detail: u8,
}

/// Creates the status values: class, detail, name for counters, and description for users.
macro_rules! statuses {
    ($(#[doc = $doc:literal] $status:ident = $class:literal, $detail:literal, $name:literal, $meaning:literal;)*) => {
        impl LoginStatus {
            $(#[doc = $doc] pub const $status: Self = Self { class: $class, detail: $detail };)*

            /// Returns the name used for counters.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$status => $name,)*
                    _ => "other",
                }
            }

            /// Returns a description for users.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$status => $meaning,)*
                    Self { class: 2, .. } => "initiator error",
                    _ => "target error",
                }
            }
        }
    };
}

statuses! {
    /// The login was successful or can be continued.
    SUCCESS = 0, 0, "success", "success";
    /// The target is temporarily available at the address in TargetAddress.
    MOVED_TEMPORARILY = 1, 1, "moved_temporarily", "the target has moved";
    /// The target has moved permanently.
    MOVED_PERMANENTLY = 1, 2, "moved_permanently", "the target has moved";
    /// Other error caused by the initiator.
    INITIATOR_ERROR = 2, 0, "initiator_error", "initiator error";
    /// Authentication of the initiator has failed.
    AUTHENTICATION_FAILURE = 2, 1, "authentication_failure", "authentication failed";
    /// The initiator is not allowed to use this target.
    AUTHORIZATION_FAILURE = 2, 2, "authorization_failure", "this initiator is not allowed to use the target";
    /// The target does not exist.
    NOT_FOUND = 2, 3, "not_found", "target not found";
    /// The target has been removed.
    TARGET_REMOVED = 2, 4, "target_removed", "the target was removed";
    /// The initiator doesn't support any of our versions.
    UNSUPPORTED_VERSION = 2, 5, "unsupported_version", "unsupported version";
    /// Too many connections in the session.
    TOO_MANY_CONNECTIONS = 2, 6, "too_many_connections", "too many connections";
    /// A required key is missing.
    MISSING_PARAMETER = 2, 7, "missing_parameter", "missing key";
    /// The connection cannot join the session.
    CANNOT_INCLUDE = 2, 8, "cannot_include", "the connection cannot join the session";
    /// This session type is not supported.
    SESSION_TYPE = 2, 9, "session_type", "unsupported session type";
    /// The session does not exist.
    NO_SUCH_SESSION = 2, 10, "no_such_session", "session not found";
    /// Not a login request.
    INVALID_DURING_LOGIN = 2, 11, "invalid_during_login", "unexpected request during login";
    /// Error caused by the target.
    TARGET_ERROR = 3, 0, "target_error", "target error";
    /// The target is currently not available.
    SERVICE_UNAVAILABLE = 3, 1, "service_unavailable", "the target is currently not available";
    /// Not enough resources.
    OUT_OF_RESOURCES = 3, 2, "out_of_resources", "the target is out of resources";
}

impl std::fmt::Display for LoginStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x}{:02x}h", self.class, self.detail)
    }
}

/// A login response. The text is in the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginResponse {
    /// Stages and flags in byte 1.
    pub flags: LoginFlags,
    /// Highest version supported by the target.
    pub version_max: u8,
    /// The version to use.
    pub version_active: u8,
    /// Same as in the request.
    pub isid: Isid,
    /// The TSIH of the session, set in the last response.
    pub tsih: Tsih,
    /// Same as in the request.
    pub itt: Itt,
    /// Status-Class and Status-Detail (RFC 7143 11.13.5).
    pub status: LoginStatus,
}

impl LoginResponse {
    /// Returns the basic header segment.
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
        // The stages are not used when the login has failed.
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
