"""The host's side of decoding: the runtime, its scheduler, requests and mailbox, and steps launched ahead."""
