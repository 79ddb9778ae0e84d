// SPDX-License-Identifier: Apache-2.0
//! Opens a byte tunnel through a sandbox's agent to a port in the sandbox.
//!
//! The agent answers an upgrade to `opendsec-tunnel`: 101 and then raw bytes, or 502 with the code
//! `port_not_open`. Going through the agent reaches ports that listen on the sandbox's loopback.

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::limits::{TUNNEL_HEAD_BYTES_MAX, TUNNEL_TIMEOUT};
use crate::prefixed::Prefixed;
use crate::upstream::ConnectError;

/// Largest number of header lines in the agent's answer.
const HEADERS_MAX: usize = 32;

/// Turn a fresh connection to the agent into one to `port`.
///
/// # Errors
/// [`ConnectError::PortClosed`] if nothing listens; [`ConnectError::Refused`] if the agent does not
/// know the token; [`ConnectError::Unreachable`] if it breaks off, stalls or answers nonsense.
pub async fn open(
    mut stream: TcpStream,
    port: u16,
    control_token: &str,
) -> Result<Prefixed<TcpStream>, ConnectError> {
    let request = format!(
        "GET /opendsec/tunnel?port={port} HTTP/1.1\r\nHost: agent\r\nConnection: Upgrade\r\n\
         Upgrade: opendsec-tunnel\r\nX-Opendsec-Control: {control_token}\r\n\r\n"
    );
    let handshake = async {
        stream.write_all(request.as_bytes()).await?;
        read_answer(&mut stream).await
    };
    let (status, rest) = match timeout(TUNNEL_TIMEOUT, handshake).await {
        Ok(answer) => answer?,
        Err(_) => {
            return Err(ConnectError::Unreachable(
                "the agent did not open the tunnel in time".to_owned(),
            ));
        }
    };
    match status {
        101 => Ok(Prefixed::new(rest, stream)),
        502 => Err(ConnectError::PortClosed),
        401 | 403 => Err(ConnectError::Refused),
        other => Err(ConnectError::Unreachable(format!(
            "the agent answered {other} to a tunnel request"
        ))),
    }
}

/// The answer's status, and the bytes after its head.
async fn read_answer(stream: &mut TcpStream) -> Result<(u16, Bytes), ConnectError> {
    let mut buffer = BytesMut::with_capacity(512);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Err(ConnectError::Unreachable(
                "the agent closed the tunnel at once".to_owned(),
            ));
        }
        if let Some((status, length)) = parse_head(&buffer)? {
            return Ok((status, buffer.split_off(length).freeze()));
        }
        if buffer.len() >= TUNNEL_HEAD_BYTES_MAX {
            return Err(ConnectError::Unreachable(
                "the agent's answer is too long".to_owned(),
            ));
        }
    }
}

fn parse_head(bytes: &[u8]) -> Result<Option<(u16, usize)>, ConnectError> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => Ok(response.code.map(|code| (code, length))),
        Ok(httparse::Status::Partial) => Ok(None),
        Err(error) => Err(ConnectError::Unreachable(format!(
            "the agent's answer is no HTTP: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads() {
        let head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nSSH-2.0";
        assert_eq!(
            parse_head(head).expect("parsed"),
            Some((101, head.len() - 7))
        );
        assert_eq!(parse_head(&head[..20]).expect("partial"), None);
        assert!(parse_head(b"SSH-2.0-OpenSSH\r\n\r\n").is_err());
    }
}
