"""The bundled target and its EAGLE3 head, the head for a chat model that is fetched, and prompts nobody trained on.

target/  head/        a small Llama and its head (README.md here says what they were trained on)
chat_head/            a head for SmolLM2-135M-Instruct, which `chat_model.fetch_chat_model` brings
prompts.json          held-out beginnings of text, by domain
chat_prompts.json     held-out questions, by kind
"""
