"""An encoder beside a decoding LLM on one GPU: what do streams, green contexts and our lane cost the tokens?"""
